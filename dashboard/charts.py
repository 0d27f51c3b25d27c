"""Small charts, up to a few thousand marks, in Altair: pure functions from figures to a chart.

Colours are Okabe and Ito's, which the colour-blind tell apart, and no colour stands alone: series are labelled, or
differ in shape, hatch or place, too. Every page shows a chart with `show`, which wants words for it.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import streamlit as st

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999",
)  # fmt: skip
OKABE_ITO = [BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY]

Chart = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart | alt.FacetChart


def show(chart: Chart, words: str, **arguments: Any) -> None:
    """Draws a chart across the page; `words` say what it shows to those who do not see it."""
    st.altair_chart(chart, width="stretch", alt=words, **arguments)
