"""Pipeline schedules as data, free of torch: which rank does what in which order, with what bubble.

`plan` is what a configuration means; `actions` the notation, `schedules` the tables of named schedules, `lowering`
what torch's runtime needs beside the computation, `check` whether a table can run at all, `timeline` when everything
happens for given costs.
"""
