"""`quantgate plan`: from a profile's settings to the capacity answer, as one object, a table, CSV or a plot."""

from pipeline.planning.compute import plan_of, plan_rows
from pipeline.planning.render import as_csv, render_plan

__all__ = ["as_csv", "plan_of", "plan_rows", "render_plan"]
