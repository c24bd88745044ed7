"""Engines and their options."""
