"""OMP_NUM_THREADS: how many threads the CPU operators of each rank share their work among."""

from probes.knobs.knob import Knob

KNOB = Knob(
    name="threads",
    hypothesis="more threads speed a rank up until the ranks of a machine want more cores than it has",
    acts_on="CPU operators (mode cpu); on GPUs only what the host computes, such as data loading",
    metric="step_wall_ns",
    variable="OMP_NUM_THREADS",
    values=("1", "2"),
    known=("the launcher gives each rank its share of the cores, torchrun alone would give it 1: it is never unset",),
)
