"""Figures that articles give for LLM engines, measured with Quire: one small module per study."""
