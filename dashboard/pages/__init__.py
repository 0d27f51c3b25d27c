"""One file per page: `TITLE`, `ICON` (a Material symbol), `ORDER` (place in the list), `ABOUT` (what `page()` needs)
and `page()`, which draws it. A file here is a page; nothing else has to know of it.

`ABOUT = "run"` is a page about the recording that the sidebar chooses (`state.current()`), listed below that choice;
`ABOUT = "folder"` one about everything in the folder, listed above.
"""
