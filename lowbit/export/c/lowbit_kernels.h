/* Products with low-bit weights by kernels that were compiled ahead: y[M, N] = x[M, K] . dequant(w)[N, K]^T.

   One library holds the kernels of one scheme (lowbit_scheme) for some shapes [N, K] and GPUs. x and y are contiguous, of the
   type lowbit_x_type. Sums are float32 and are rounded once. Every call returns the same bits for the same operands.

       lowbit_quantize(w, n, k, codes, scale, zero);                   on the host: round to nearest
       lowbit_pack(codes, scale, zero, n, k, packed, &form);           on the host: the order that the kernels read
       cuMemcpyHtoD(weight, packed, lowbit_weight_bytes(n, k));
       lowbit_open(&library);                                          the current context's GPU
       cuMemsetD8(workspace, 0, lowbit_workspace_bytes(library, n, k, m));
       lowbit_multiply(library, y, x, weight, form, workspace, m, n, k, stream);

   The library loads the driver (libcuda.so.1) at lowbit_open; the other functions need no GPU. Functions that return int return
   LOWBIT_OK or an error, which lowbit_message explains. A library may be used by several threads at once, a workspace by one
   stream at a time. Addresses of the GPU are CUdeviceptr, streams are CUstream (NULL: the default stream). */

#ifndef LOWBIT_KERNELS_H
#define LOWBIT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LOWBIT_OK = 0,
    LOWBIT_UNSUPPORTED = 1, /* another shape or GPU than the library was made for, or unaligned addresses */
    LOWBIT_INVALID = 2,     /* weights, scales or codes that are not valid numbers */
    LOWBIT_DRIVER = 3       /* the driver is missing, or one of its functions failed */
};

typedef struct lowbit_library lowbit_library;
typedef uint64_t lowbit_address;

/* Text of this thread's last error. */
const char *lowbit_message(void);

/* Name of the scheme, such as "w4a16_g128", and "fp16" or "bf16". */
const char *lowbit_scheme(void);
const char *lowbit_x_type(void);

/* Number of shapes, and shape i of them. */
int lowbit_shapes(void);
int lowbit_shape(int i, int *n, int *k);

/* Rows and columns that share one scale; scales are [ceil(n / rows), ceil(k / columns)], and so are zeros. */
int lowbit_scale_block(int n, int k, int *rows, int *columns);

/* Round to nearest: codes uint8 [n, k] and scales of the weights w [n, k]. zero: as many numbers as scales if the scheme has
   zero points, else NULL. Equal to lowbit.rtn, with scales of the type that the library stores. */
int lowbit_quantize(const float *w, int n, int k, uint8_t *codes, float *scale, float *zero);

/* The weights that codes, scales and zeros stand for: w [n, k]. */
int lowbit_dequantize(const uint8_t *codes, const float *scale, const float *zero, int n, int k, float *w);

/* Bytes of a packed weight, 0 for an unknown shape. */
size_t lowbit_weight_bytes(int n, int k);

/* Packs codes uint8 [n, k], scales and zeros (NULL without zero points) in the order of the kernels. packed has
   lowbit_weight_bytes bytes; its copy on the GPU starts at a multiple of 256 bytes, as cuMemAlloc's addresses do. form: what
   lowbit_multiply needs to know of the scales beside the bytes; store it with them. */
int lowbit_pack(const uint8_t *codes, const float *scale, const float *zero, int n, int k, void *packed, int *form);

/* Loads the kernels for the GPU of the current CUDA context. */
int lowbit_open(lowbit_library **library);
void lowbit_close(lowbit_library *library);

/* The GPU whose kernels are loaded: that of the context, or one of the same architecture. */
const char *lowbit_product(const lowbit_library *library);

/* Bytes of the workspace for products of up to m rows. Set it to 0 once, before its first use. It starts at a multiple of 256
   bytes. 0: an unknown shape. */
size_t lowbit_workspace_bytes(const lowbit_library *library, int n, int k, int m);

/* Launches y [m, n] = x [m, k] . w^T on a stream, for any m. x and y start at multiples of 16 bytes. */
int lowbit_multiply(
    lowbit_library *library, lowbit_address y, lowbit_address x, lowbit_address weight, int form, lowbit_address workspace,
    int m, int n, int k, void *stream);

/* What lowbit_multiply launches for m of 1 to LOWBIT_MOST_ROWS rows on a GPU of the library; larger products are made of slices
   of LOWBIT_MOST_ROWS rows. product: as lowbit_product; form as lowbit_pack. */
#define LOWBIT_MOST_ROWS 4096
typedef struct {
    const char *kernel;
    const char *tile;
    int grid[3], threads, shared_bytes;
    size_t sums, counters; /* float32 sums and int32 counters in the workspace */
} lowbit_launch;
int lowbit_choose(const char *product, int form, int m, int n, int k, lowbit_launch *launch);

#ifdef __cplusplus
}
#endif
#endif
