/* Rounds weights to codes and packs them on the host. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "lowbit_kernels.h"
#include "tables.h"

#define ROW_BLOCK 16
#define TILE_K 64
#define STEP_K 128
#define ALIGNED 256

static int divided(int a, int b) { return (int)(((int64_t)a + b - 1) / b); }

static size_t aligned(size_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

int lowbit_groups(int k) { return scheme.group == 0 ? 0 : divided(k, STEP_K) * (STEP_K / scheme.group); }

/* Numbers of a row block and group of the kernels: scales of 16 rows, then zeros of 16 rows. */
static int numbers_of_group(void) { return scheme.zero == NO_ZERO ? ROW_BLOCK : 2 * ROW_BLOCK; }

weight_layout lowbit_layout(int n, int k) {
    size_t blocks = (size_t)divided(n, ROW_BLOCK);
    weight_layout at;
    at.scale = aligned(blocks * (size_t)divided(k, TILE_K) * 128u * (size_t)scheme.bits);
    at.channel_scale = at.scale + aligned(blocks * (size_t)lowbit_groups(k) * (size_t)numbers_of_group() * 2u);
    at.bytes = at.channel_scale + aligned((size_t)n * 4u);
    return at;
}

size_t lowbit_weight_bytes(int n, int k) { return lowbit_check_shape(n, k) == LOWBIT_OK ? lowbit_layout(n, k).bytes : 0; }

/* 1, with a message, if zero points are given to a scheme without them, or not given to one with them. */
static int lacks_zero(const float *zero) {
    if ((zero == NULL) == (scheme.zero == NO_ZERO)) return 0;
    lowbit_failed(LOWBIT_INVALID, "%s has %szero points", scheme.name, scheme.zero == NO_ZERO ? "no " : "");
    return 1;
}

int lowbit_scale_block(int n, int k, int *rows, int *columns) {
    int error = lowbit_check_shape(n, k);
    if (error != LOWBIT_OK) return error;
    *rows = scheme.block_rows == 0 ? n : scheme.block_rows;
    *columns = scheme.block_columns == 0 ? k : scheme.block_columns;
    return LOWBIT_OK;
}

/* x rounded to a significand of `digits` bits, ties to even, at any exponent. */
static float rounded(float x, int digits) {
    int exponent;
    float fraction = frexpf(x, &exponent);
    return ldexpf(rintf(ldexpf(fraction, digits)), exponent - digits);
}

static uint16_t bf16_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static uint16_t fp16_bits(float x) {
    uint16_t sign = signbit(x) ? 0x8000u : 0u;
    float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00u; /* rounds to infinity */
    if (size < 0x1p-14f) return sign | (uint16_t)rintf(ldexpf(size, 24));
    int exponent;
    float fraction = frexpf(rounded(size, 11), &exponent);
    return sign | (uint16_t)((exponent + 14) * 1024 + (int)(fraction * 2048.0f) - 1024);
}

static uint8_t encoded_integer(float x) {
    float value = rintf(x);
    value = value < (float)scheme.least ? (float)scheme.least : value > (float)scheme.most ? (float)scheme.most : value;
    return (uint8_t)((int)value + scheme.offset);
}

/* A float of the scheme's format: the number of steps within the binade of x, plus the code of the binade's start. */
static uint8_t encoded_float(float x) {
    float size = fabsf(x);
    uint32_t bits;
    memcpy(&bits, &size, sizeof bits);
    int lowest = 1 - scheme.bias, above = (1 << (scheme.bits - 1 - scheme.mantissa)) - scheme.bias;
    int exponent = (int)(bits >> 23) - 127;
    exponent = exponent < lowest ? lowest : exponent > above ? above : exponent;
    float steps = ldexpf(size, scheme.mantissa - exponent), whole = rintf(steps);
    if (scheme.mantissa == 0 && steps == 1.5f && (exponent - lowest) % 2 == 1) whole = 1.0f; /* a tie goes to the even code */
    float code = whole + (float)((exponent - lowest) << scheme.mantissa);
    int limited = code > (float)scheme.max_code ? scheme.max_code : (int)code;
    return (uint8_t)(limited | (signbit(x) ? 1 << (scheme.bits - 1) : 0));
}

/* Scale and zero of weights from `low` to `high`. */
static void fit(float low, float high, float *scale, float *zero) {
    float below = low < 0.0f ? low : 0.0f, above = high > 0.0f ? high : 0.0f;
    float span = scheme.zero == NO_ZERO ? (-low > high ? -low : high) : scheme.zero == INTEGER_ZERO ? above - below : high - low;
    *scale = span / scheme.max;
    *scale = *scale > 0.0f ? (scheme.per_channel ? *scale : rounded(*scale, scheme.scale_digits)) : 1.0f;
    if (scheme.zero == INTEGER_ZERO) {
        float value = rintf(-below / *scale);
        *zero = value > scheme.max ? scheme.max : value;
    } else if (scheme.zero == FLOAT_ZERO) {
        *zero = rounded(low, scheme.scale_digits);
    }
}

static uint8_t encoded(float w, float scale, float zero) {
    float x = scheme.zero == FLOAT_ZERO ? (w - zero) / scale : w / scale;
    if (scheme.zero == INTEGER_ZERO) x = x + zero;
    return scheme.is_float ? encoded_float(x) : encoded_integer(x);
}

int lowbit_quantize(const float *w, int n, int k, uint8_t *codes, float *scale, float *zero) {
    int rows, columns, error = lowbit_scale_block(n, k, &rows, &columns);
    if (error != LOWBIT_OK) return error;
    if (lacks_zero(zero)) return LOWBIT_INVALID;
    for (int64_t i = 0; i < (int64_t)n * k; i++)
        if (!isfinite(w[i]))
            return lowbit_failed(
                LOWBIT_INVALID, "weights must be finite; the one in row %d, column %d is not", (int)(i / k), (int)(i % k));
    int grid_k = divided(k, columns);
    for (int r = 0; r < n; r += rows) {
        for (int c = 0; c < k; c += columns) {
            int end_r = r + rows < n ? r + rows : n, end_c = c + columns < k ? c + columns : k;
            float low = w[(int64_t)r * k + c], high = low;
            for (int i = r; i < end_r; i++)
                for (int j = c; j < end_c; j++) {
                    float value = w[(int64_t)i * k + j];
                    low = value < low ? value : low;
                    high = value > high ? value : high;
                }
            int64_t at = (int64_t)(r / rows) * grid_k + c / columns;
            float offset = 0.0f;
            fit(low, high, &scale[at], &offset);
            if (zero != NULL) zero[at] = offset;
            for (int i = r; i < end_r; i++)
                for (int j = c; j < end_c; j++)
                    codes[(int64_t)i * k + j] = encoded(w[(int64_t)i * k + j], scale[at], offset);
        }
    }
    return LOWBIT_OK;
}

static float decoded(unsigned code) {
    if (!scheme.is_float) return (float)((int)code - scheme.offset);
    unsigned size = code & ((1u << (scheme.bits - 1)) - 1u), fraction = size & ((1u << scheme.mantissa) - 1u);
    int field = (int)(size >> scheme.mantissa);
    unsigned steps = fraction + (field > 0 ? 1u << scheme.mantissa : 0u);
    float value = ldexpf((float)steps, (field > 1 ? field : 1) - scheme.bias - scheme.mantissa);
    return size == code ? value : -value;
}

int lowbit_dequantize(const uint8_t *codes, const float *scale, const float *zero, int n, int k, float *w) {
    int rows, columns, error = lowbit_scale_block(n, k, &rows, &columns);
    if (error != LOWBIT_OK) return error;
    if (lacks_zero(zero)) return LOWBIT_INVALID;
    int grid_k = divided(k, columns);
    for (int r = 0; r < n; r++)
        for (int c = 0; c < k; c++) {
            int64_t at = (int64_t)(r / rows) * grid_k + c / columns, i = (int64_t)r * k + c;
            float value = decoded(codes[i]);
            if (scheme.zero == INTEGER_ZERO) value -= zero[at];
            w[i] = scheme.zero == FLOAT_ZERO ? value * scale[at] + zero[at] : value * scale[at];
        }
    return LOWBIT_OK;
}

/* The codes of one tile as the words of its 32 lanes. */
static void pack_tile(const uint8_t *codes, int n, int k, int row, int column, uint32_t *words) {
    memset(words, 0, 128u * (size_t)scheme.bits);
    for (int r = 0; r < ROW_BLOCK && row + r < n; r++)
        for (int c = 0; c < TILE_K && column + c < k; c++) {
            unsigned code = codes[(int64_t)(row + r) * k + column + c];
            const uint16_t *places = bit_places + (r * TILE_K + c) * scheme.bits;
            for (int b = 0; b < scheme.bits; b++) words[places[b] / 32] |= ((code >> b) & 1u) << (places[b] % 32);
        }
}

/* Scales and zeros as given, of the matrix [n, k]; `stored` is what scales are rounded to before all else. */
typedef struct {
    const float *scale, *zero;
    int n, k, rows, columns, grid_n, grid_k;
} scales;

static float stored(float x) { return scheme.scale_digits == 8 && !scheme.per_channel ? rounded(x, 8) : x; }

/* Largest size in a row of scales, and with `smallest` the smallest that is not 0. */
static float largest_scale(const scales *s, int row, float *smallest) {
    float largest = 0.0f;
    *smallest = INFINITY;
    for (int g = 0; g < s->grid_k; g++) {
        float size = fabsf(stored(s->scale[(int64_t)row * s->grid_k + g]));
        largest = size > largest ? size : largest;
        if (size > 0.0f && size < *smallest) *smallest = size;
    }
    return largest;
}

/* Codes may be used as subnormal numbers if no scale is too small beside the largest of its row. */
static int as_subnormals(const scales *s) {
    if (!scheme.may_be_subnormal) return 0;
    for (int row = 0; row < s->grid_n; row++) {
        float smallest, largest = largest_scale(s, row, &smallest);
        if (!(largest < 0x1p100f) || smallest < ldexpf(largest, -(3 + scheme.bits))) return 0;
    }
    return 1;
}

/* The power of two by which a row's scales are divided. */
static float row_factor(const scales *s, int row, int form) {
    int exponent, least = form == SUBNORMAL ? -110 : -126;
    float smallest, largest = largest_scale(s, row, &smallest);
    if (scheme.zero == FLOAT_ZERO)
        for (int g = 0; g < s->grid_k; g++) {
            float size = fabsf(stored(s->zero[(int64_t)row * s->grid_k + g])) / 256.0f;
            largest = size > largest ? size : largest;
        }
    frexpf(form == SUBNORMAL ? largest * (1.0f + 0x1p-11f) : largest, &exponent);
    exponent = exponent < least ? least : exponent > 127 ? 127 : exponent;
    return ldexpf(form == SUBNORMAL ? 0x1p-16f : 1.0f, exponent);
}

/* Writes one number of 16 bits for each of 16 rows, rows r and r + 8 beside each other. */
static void pack_rows(const scales *s, const float *values, const float *factors, int row, int group, int as_bf16, uint16_t *at) {
    int stride = scheme.zero == NO_ZERO ? 2 : 4, column = group * scheme.group;
    for (int i = 0; i < ROW_BLOCK; i++) {
        int r = row + i;
        float value = 0.0f;
        if (r < s->n && column < s->k) {
            int scale_row = r / s->rows;
            value = values == NULL ? 1.0f : values[(int64_t)scale_row * s->grid_k + column / s->columns];
            if (factors != NULL) value = stored(value) / factors[scale_row];
        }
        at[i % 8 * stride + i / 8] = as_bf16 ? bf16_bits(value) : fp16_bits(value);
    }
}

static int check_scales(const scales *s) {
    for (int64_t i = 0; i < (int64_t)s->grid_n * s->grid_k; i++) {
        if (!isfinite(s->scale[i])) return lowbit_failed(LOWBIT_INVALID, "scales must be finite; number %lld is not", (long long)i);
        if (s->zero == NULL) continue;
        float zero = s->zero[i];
        if (!isfinite(zero) || (scheme.zero == INTEGER_ZERO && (zero != rintf(zero) || zero < 0.0f || zero > scheme.max)))
            return lowbit_failed(
                LOWBIT_INVALID, "zero points must be %s; number %lld is %g",
                scheme.zero == INTEGER_ZERO ? "codes of the scheme" : "finite", (long long)i, (double)zero);
    }
    return LOWBIT_OK;
}

/* `factors` has room for one number for each row of scales. */
static void pack_scales(const scales *s, int form, float *factors, char *packed) {
    weight_layout at = lowbit_layout(s->n, s->k);
    int as_bf16 = form == OF_CHANNELS || scheme.scale_digits == 8, groups = lowbit_groups(s->k);
    for (int row = 0; row < s->grid_n && form != OF_CHANNELS; row++) factors[row] = row_factor(s, row, form);
    uint16_t *numbers = (uint16_t *)(packed + at.scale);
    for (int row = 0; row < s->n; row += ROW_BLOCK)
        for (int g = 0; g < groups; g++, numbers += numbers_of_group()) {
            const float *divisors = form == OF_CHANNELS ? NULL : factors;
            pack_rows(s, form == OF_CHANNELS ? NULL : s->scale, divisors, row, g, as_bf16, numbers);
            if (s->zero != NULL) pack_rows(s, s->zero, scheme.zero == FLOAT_ZERO ? divisors : NULL, row, g, as_bf16, numbers + 2);
        }
    for (int row = 0; row < s->n; row++) {
        float value = form == OF_CHANNELS ? s->scale[row / s->rows] : factors[row / s->rows];
        if (form == SUBNORMAL)
            ((uint16_t *)(packed + at.channel_scale))[row] = bf16_bits(value);
        else
            ((float *)(packed + at.channel_scale))[row] = value;
    }
}

int lowbit_pack(const uint8_t *codes, const float *scale, const float *zero, int n, int k, void *packed, int *form) {
    int rows, columns, error = lowbit_scale_block(n, k, &rows, &columns);
    if (error != LOWBIT_OK) return error;
    if (lacks_zero(zero)) return LOWBIT_INVALID;
    for (int64_t i = 0; i < (int64_t)n * k; i++)
        if (codes[i] >> scheme.bits)
            return lowbit_failed(
                LOWBIT_INVALID, "codes of %s are less than %d; the one in row %d, column %d is %d", scheme.name, 1 << scheme.bits,
                (int)(i / k), (int)(i % k), codes[i]);
    scales s = {scale, zero, n, k, rows, columns, divided(n, rows), divided(k, columns)};
    error = check_scales(&s);
    if (error != LOWBIT_OK) return error;
    memset(packed, 0, lowbit_layout(n, k).bytes);
    *form = scheme.per_channel ? OF_CHANNELS : as_subnormals(&s) ? SUBNORMAL : DIVIDED;
    uint32_t *words = packed;
    for (int row = 0; row < n; row += ROW_BLOCK)
        for (int column = 0; column < k; column += TILE_K, words += 32 * scheme.bits) pack_tile(codes, n, k, row, column, words);
    float *factors = NULL;
    if (*form != OF_CHANNELS && (factors = malloc((size_t)s.grid_n * sizeof *factors)) == NULL)
        return lowbit_failed(LOWBIT_INVALID, "no memory for %d numbers", s.grid_n);
    pack_scales(&s, *form, factors, packed);
    free(factors);
    return LOWBIT_OK;
}
