"""Settings that change while replicas run: those of Serve's `user_config`, in place of the application's own.

Ray Serve starts every replica anew when the `args` of an application change. What its file gives as
`user_config` of a deployment it passes to the running replicas instead:

    deployments:
      - name: Gateway
        user_config: {deadline_s: 1.0, limits: {rate: 20}}
"""

from collections.abc import Mapping
from typing import Any

from scalingnote.core.config import merge, validate
from scalingnote.core.errors import ConfigError
from scalingnote.run.service_config import ServeConfig, ServicePart
from scalingnote.serve.telemetry import get_logger

# By part; what is not named comes from `args`. The gateway's `query_cache` is of the encoders in its process.
RUNNING_SETTINGS: dict[ServicePart, tuple[str, ...]] = {
    "gateway": ("limits", "deadline_s", "canary", "query_cache"),
    "encoder": ("query_cache",),
}
log = get_logger()


class RunningSettings:
    """The settings of a replica, now.

    Args:
        config: of the application.
        part: that runs.

    Attributes:
        refused: why the latest `user_config` changed nothing; empty if it did.
    """

    def __init__(self, config: ServeConfig, part: ServicePart) -> None:
        self._given, self._part = config, part
        self._now: ServeConfig | None = None  # None: Serve has not called yet, this replica starts
        self.refused = ""

    def take(self, user_config: Mapping[str, Any]) -> ServeConfig:
        """The settings with those of a `user_config`, from now on; of a section, those that differ suffice.

        A replica that starts refuses an invalid one by a ConfigError. One that runs goes on as before: Serve
        would end it, and with it the service, for a typing error.
        """
        try:
            self._now, self.refused = self._with(user_config), ""
        except ConfigError as error:
            if self._now is None:
                raise
            self.refused = str(error)
            log.error("the settings stay as they are: %s", error)
        return self._now

    def _with(self, user_config: Mapping[str, Any]) -> ServeConfig:
        names = RUNNING_SETTINGS[self._part]
        if others := [name for name in user_config if name not in names]:
            raise ConfigError(
                f"user_config of the {self._part}: {others[0]} cannot change while it runs, only "
                f"{', '.join(names)}; set it in the application's args, and replicas start anew"
            )
        values = merge(self._given.model_dump(exclude_unset=True), dict(user_config))
        return validate(ServeConfig, values, source=f"user_config of the {self._part}")
