"""Timelines of any length: what ran on each rank and what memory was held, at the detail that a screen can show.

`index` turns a capture into columns once, which `dashboard.store` keeps on disk; `detail` cuts a window of time out of
them: every column of pixels with its true share, or the events themselves where they are few. `strip` does the same
for memory. `picture` makes a view of both, `payload` its bytes, `component` puts them on a page, `assets/` draws them.
"""
