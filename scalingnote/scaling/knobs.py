"""What a user gave, or did not give, as constants of a plan."""

from scalingnote.scaling.config import PlanConfig
from scalingnote.scaling.constants import Constant, Stated
from scalingnote.scaling.quantity import Quantity, of


def knob(config: PlanConfig, name: str, unit: str) -> Quantity:
    """A knob of the plan; its source tells whether somebody gave it, and what it says."""
    given = name in config.model_fields_set
    says = PlanConfig.model_fields[name].description
    option = f"--{name.replace('_', '-')}"
    source = Stated("given" if given else "assumed", f"{option}: {says}" if given else f"{says} ({option})")
    label = {"qps": "queries a second", "mfu": "MFU", "dims": "dimensions"}.get(name, name.replace("_", " "))
    value = getattr(config, name)
    return of(Constant(label, float(value[-1] if isinstance(value, tuple) else value), unit, source))
