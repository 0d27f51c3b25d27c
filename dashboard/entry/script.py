"""What Streamlit runs, in a folder of its own: beside a folder `pages/` it would take each file there for a script."""

from dashboard.app import main

if __name__ == "__main__":  # which it is for Streamlit
    main()
