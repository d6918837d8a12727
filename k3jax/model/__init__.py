"""The mathematics: one file for each idea of K3 and Kimi-Linear (k3.md section 2)."""
