"""Does a setting change anything? Repeated recordings of arms that differ in it, and a verdict with its interval.

`knobs` says what can be tried and what is known of it, `experiment` fixes a plan before anything runs, `engine` runs
its trials, `validity` decides which of them count, `analysis` compares the arms (by `stats`) and `text` says it.
Nothing here imports torch: a trial is a process tree of its own.
"""
