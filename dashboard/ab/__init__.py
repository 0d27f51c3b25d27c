"""Experiments of `meshscope probe`, for the page of A/B: `extract` is what is known of one, from the functions behind
`meshscope report EXPERIMENT`; `charts` draws it, `side` puts the arms' timelines on one axis.
"""
