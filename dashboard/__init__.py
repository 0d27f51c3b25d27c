"""The Streamlit dashboard over a folder of recordings."""
