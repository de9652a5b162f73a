"""What every loss must do, whatever its formula: the tests run over ``largemargin.losses.LOSSES``.

A new loss is covered by adding its entry to ``zoo.py``; the suite fails until it is there.
"""
