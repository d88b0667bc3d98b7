"""Towers: backbone, prompt, pooling and projection; lookup tables; published models and exports."""
