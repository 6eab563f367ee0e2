"""Confidence estimators and calibrators that ship with dspark, one a module."""
