"""Numbers that functions on a GPU and their emulation share."""

TANH_P = (0.9999992650068994, 0.12358827290492712, 0.002326756767280035, 4.161894355385504e-06)
TANH_Q = (1.0, 0.45691590655132824, 0.02130617430984601, 0.0001477165544081004)
"""tanh(x) = x · P(x²) / Q(x²) within 2^-20.3 of itself for |x| <= 6.7, where 1 - tanh(x) is 2^-18.3; lowest powers first.
Fitted by iteratively reweighted least squares."""
TANH_LIMIT = 6.7
