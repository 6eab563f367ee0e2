"""Measuring drafters: rounds collected through the engine, calibration, acceptance, figures and reports."""
