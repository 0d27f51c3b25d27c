"""What an experiment says, for a page: `reading` recomputes it from its folder, `data` gives the figures behind every
picture, `figures` draws them, `page` puts them together.
"""
