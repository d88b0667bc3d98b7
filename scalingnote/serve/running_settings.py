"""Settings that change while replicas run: those of Serve's `user_config` replace those of the application.

Ray Serve restarts every replica when the `args` of an application change. It passes the `user_config` of a
deployment to the running replicas instead:

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

# The names by part; other settings come from `args`. The gateway has a `query_cache` for encoders in its
# process.
RUNNING_SETTINGS: dict[ServicePart, tuple[str, ...]] = {
    "gateway": ("limits", "deadline_s", "canary", "query_cache"),
    "encoder": ("query_cache",),
}
log = get_logger()


class RunningSettings:
    """The current settings of a replica.

    Args:
        config: of the application.
        part: of the application that the replica runs.

    Attributes:
        refused: why the latest `user_config` is invalid; empty if it is valid.
    """

    def __init__(self, config: ServeConfig, part: ServicePart) -> None:
        self._given, self._part = config, part
        self._now: ServeConfig | None = None  # None: Serve has not called yet, because this replica starts
        self.refused = ""

    def take(self, user_config: Mapping[str, Any]) -> ServeConfig:
        """Apply a `user_config` and return the settings; of a section it needs only the options that differ.

        A replica that starts refuses an invalid `user_config` by a ConfigError. A running replica keeps its
        settings: for an error Serve would end it, and with it the service, because of a typing error.
        """
        try:
            self._now, self.refused = self._with(user_config), ""
        except ConfigError as error:
            if self._now is None:
                raise
            self.refused = str(error)
            log.error("the settings are not changed: %s", error)
        return self._now

    def _with(self, user_config: Mapping[str, Any]) -> ServeConfig:
        names = RUNNING_SETTINGS[self._part]
        if others := [name for name in user_config if name not in names]:
            raise ConfigError(
                f"user_config of the {self._part}: {others[0]} cannot change while it runs, only "
                f"{', '.join(names)}; set it in the application's args, and the replicas restart"
            )
        values = merge(self._given.model_dump(exclude_unset=True), dict(user_config))
        return validate(ServeConfig, values, source=f"user_config of the {self._part}")
