/* Multiplies with a library's kernels and checks the products against sums in double precision.

       ./example [N K]        the first shape of the library by default

   Prints a line for each M, and ends with 1 if an error is too large. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"
#include "lowbit_kernels.h"

#define TRIES 200
#define MOST_SAMPLES 64

static void require(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, lowbit_message());
    exit(1);
}

static void *memory(size_t bytes) {
    void *found = malloc(bytes);
    if (found == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return found;
}

/* Numbers of a normal distribution, nearly: the sum of 12 uniform ones. */
static float normal(uint64_t *state) {
    float sum = -6.0f;
    for (int i = 0; i < 12; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(*state >> 40) * 0x1p-24f;
    }
    return sum;
}

static int is_bf16(void) { return strcmp(lowbit_x_type(), "bf16") == 0; }

/* A normal number rounded to zero, so exactly representable in 16 bits. */
static uint16_t to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (is_bf16()) return (uint16_t)(bits >> 16);
    int exponent = (int)(bits >> 23 & 255u) - 112;
    return (uint16_t)((bits >> 16 & 0x8000u) | (exponent <= 0 ? 0u : (uint32_t)exponent << 10 | (bits >> 13 & 0x3ffu)));
}

static float from_half(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    if (!is_bf16()) {
        int exponent = half >> 10 & 31;
        float size = ldexpf((float)((half & 0x3ff) + (exponent > 0 ? 1024 : 0)), (exponent > 0 ? exponent : 1) - 25);
        return exponent == 31 ? NAN : half >> 15 ? -size : size;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Sample i of `count` numbers below `of`, the first and the last among them. */
static int sample(int i, int count, int of) { return count == 1 ? 0 : (int)((int64_t)i * (of - 1) / (count - 1)); }

/* Largest error of the products, divided by their root mean square; NaN where an output was not written. */
static double largest_error(const uint16_t *y, const uint16_t *x, const float *w, int m, int n, int k) {
    for (int64_t i = 0; i < (int64_t)m * n; i++)
        if (isnan(from_half(y[i]))) return NAN;
    int rows = m < MOST_SAMPLES ? m : MOST_SAMPLES, columns = n < MOST_SAMPLES ? n : MOST_SAMPLES;
    double largest = 0.0, squares = 0.0;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            int64_t row = sample(i, rows, m), channel = sample(j, columns, n);
            double sum = 0.0;
            for (int c = 0; c < k; c++) sum += (double)from_half(x[row * k + c]) * (double)w[channel * k + c];
            double error = fabs((double)from_half(y[row * n + channel]) - sum);
            largest = error > largest ? error : largest;
            squares += sum * sum;
        }
    return largest / sqrt(squares / (rows * columns));
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Multiplies M rows; returns 1 if the error is small. */
static int check(
    const driver *cuda, lowbit_library *library, CUdeviceptr weight, int form, const float *w, int m, int n, int k) {
    size_t x_count = (size_t)m * (size_t)k, y_count = (size_t)m * (size_t)n;
    size_t workspace_bytes = lowbit_workspace_bytes(library, n, k, m);
    uint16_t *x = memory(2 * x_count), *y = memory(2 * y_count);
    uint64_t state = (uint64_t)m;
    for (size_t i = 0; i < x_count; i++) x[i] = to_half(normal(&state));
    CUdeviceptr on_gpu[3];
    int failed = cuda->cuMemAlloc(&on_gpu[0], 2 * x_count) | cuda->cuMemAlloc(&on_gpu[1], 2 * y_count) |
                 cuda->cuMemAlloc(&on_gpu[2], workspace_bytes) | cuda->cuMemcpyHtoD(on_gpu[0], x, 2 * x_count) |
                 cuda->cuMemsetD8(on_gpu[1], 0xff, 2 * y_count) | cuda->cuMemsetD8(on_gpu[2], 0, workspace_bytes) |
                 cuda->cuCtxSynchronize();
    double start = 0.0;
    for (int i = 0; i <= TRIES && !failed; i++) { /* the first one is not timed */
        int error = lowbit_multiply(library, on_gpu[1], on_gpu[0], weight, form, on_gpu[2], m, n, k, NULL);
        require(error == LOWBIT_OK, "lowbit_multiply");
        if (i > 0) continue;
        failed = cuda->cuCtxSynchronize() | cuda->cuMemcpyDtoH(y, on_gpu[1], 2 * y_count);
        start = seconds();
    }
    failed |= cuda->cuCtxSynchronize();
    double each_us = 1e6 * (seconds() - start) / TRIES, error = failed ? NAN : largest_error(y, x, w, m, n, k);
    uint16_t *again = memory(2 * y_count);
    failed |= cuda->cuMemcpyDtoH(again, on_gpu[1], 2 * y_count);
    int same = memcmp(y, again, 2 * y_count) == 0, ok = !failed && same && error < (is_bf16() ? 0.03 : 0.004);
    lowbit_launch launch;
    require(
        lowbit_choose(lowbit_product(library), form, m < LOWBIT_MOST_ROWS ? m : LOWBIT_MOST_ROWS, n, k, &launch) == LOWBIT_OK,
        "lowbit_choose");
    printf("M %5d  error %.5f%s  %8.1f us  %s: %s%s\n", m, error, same ? "" : ", bits differ", each_us, launch.kernel, launch.tile,
           ok ? "" : "  FAILED");
    for (int i = 0; i < 3; i++) cuda->cuMemFree(on_gpu[i]);
    free(x), free(y), free(again);
    return ok;
}

int main(int count, char **arguments) {
    const char *why;
    const driver *cuda = lowbit_driver(&why);
    CUdevice device;
    CUcontext context;
    int n, k, form, rows, columns, all_ok = 1;
    if (cuda == NULL || cuda->cuDeviceGet(&device, 0) || cuda->cuDevicePrimaryCtxRetain(&context, device) ||
        cuda->cuCtxSetCurrent(context)) {
        fprintf(stderr, "no GPU: %s\n", cuda == NULL ? why : "no context");
        return 1;
    }
    require(lowbit_shape(0, &n, &k) == LOWBIT_OK, "lowbit_shape");
    if (count == 3) n = atoi(arguments[1]), k = atoi(arguments[2]);
    require(lowbit_scale_block(n, k, &rows, &columns) == LOWBIT_OK, "lowbit_scale_block");

    size_t size = (size_t)n * (size_t)k, bytes = lowbit_weight_bytes(n, k);
    size_t scales = (size_t)((n + rows - 1) / rows) * (size_t)((k + columns - 1) / columns);
    float *w = memory(4 * size), *scale = memory(4 * scales), *zero = memory(4 * scales);
    uint8_t *codes = memory(size);
    void *packed = memory(bytes);
    uint64_t state = 1;
    for (size_t i = 0; i < size; i++) w[i] = 0.02f * normal(&state);
    if (lowbit_quantize(w, n, k, codes, scale, zero) != LOWBIT_OK) free(zero), zero = NULL; /* a scheme without zero points */
    require(lowbit_quantize(w, n, k, codes, scale, zero) == LOWBIT_OK, "lowbit_quantize");
    require(lowbit_pack(codes, scale, zero, n, k, packed, &form) == LOWBIT_OK, "lowbit_pack");
    require(lowbit_dequantize(codes, scale, zero, n, k, w) == LOWBIT_OK, "lowbit_dequantize");

    lowbit_library *library;
    require(lowbit_open(&library) == LOWBIT_OK, "lowbit_open");
    CUdeviceptr weight;
    if (cuda->cuMemAlloc(&weight, bytes) || cuda->cuMemcpyHtoD(weight, packed, bytes)) {
        fprintf(stderr, "no memory on the GPU for %zu bytes\n", bytes);
        return 1;
    }
    printf("%s, x %s, N %d, K %d, kernels of %s\n", lowbit_scheme(), lowbit_x_type(), n, k, lowbit_product(library));
    static const int ms[] = {1, 2, 5, 8, 16, 17, 32, 64, 100, 128, 256, 700, 1024, 4096, 4196};
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) all_ok &= check(cuda, library, weight, form, w, ms[i], n, k);
    cuda->cuMemFree(weight);
    lowbit_close(library);
    cuda->cuDevicePrimaryCtxRelease(device);
    free(w), free(scale), free(zero), free(codes), free(packed);
    return all_ok ? 0 : 1;
}
