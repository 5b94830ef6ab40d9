"""The compiled form of the arithmetic of exact sums: one pass where torch takes six (ADR-0063).

It decides how the kernel is built, where it is kept, and that it is used only if it gives the bits of the
form in torch (`workers.compute.gradient_sum`), which is used everywhere else: on devices, and on machines
without a C compiler. The fork server builds it; an instance only loads it. It never decides what is summed.
"""
