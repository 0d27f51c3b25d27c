"""The Streamlit pages over a folder of recordings; `meshscope dashboard` starts them.

`serve` is the server, `app` what every browser session runs, `pages/` one file per page. `discover` finds
what there is to show, `prepare` analyses it once in a process of its own, `store` keeps the results on disk, `data`
hands them to the pages, `state` keeps what is chosen in the URL. No figure is computed here: pages show what
`harness.report`, `harness.trace`, `harness.memory` and `harness.compare` return, as `--json` does.
"""
