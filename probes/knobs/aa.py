"""The same run against itself: what this machine can tell apart, and whether the rig is sound."""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="aa",
    hypothesis="nothing differs, so nothing may be found; the width of the intervals is what this machine can see",
    acts_on="nothing: run it once per machine and configuration, before other probes",
    metric="step_wall_ns",
    values=("same", "same"),
)
