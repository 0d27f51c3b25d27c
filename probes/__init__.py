"""A/B experiments over environment variables and settings: knobs x repeated recordings -> verdict."""
