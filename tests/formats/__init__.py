from lowbit.formats import float_format, int_format, uint_format

INT_FORMATS = [make(bits) for bits in range(2, 9) for make in (int_format, uint_format)]
FLOAT_FORMATS = [float_format(e, m) for e in range(1, 8) for m in range(0, 7) if 3 <= 1 + e + m <= 8]
ALL_FORMATS = INT_FORMATS + FLOAT_FORMATS
