/* The generated data of a library: tables.c has the values, cubins.S the machine code. */

#ifndef LOWBIT_TABLES_H
#define LOWBIT_TABLES_H

#include <stdint.h>

/* Where the value of a kernel's parameter comes from. */
enum source {
    FROM_Y,
    FROM_X,
    FROM_CODES,
    FROM_SCALE,
    FROM_CHANNEL_SCALE,
    FROM_SUMS,
    FROM_COUNTERS,
    FROM_M,
    FROM_TOKEN_TILES,
    FROM_INT,   /* value */
    FROM_LONG,  /* value, as 64 bits */
    FROM_FLOAT, /* value is the bits of a float32 */
    FROM_MAP,   /* tensor map number `value` */
    FROM_NULL   /* an address of nothing */
};

typedef struct {
    enum source source;
    int32_t value;
} parameter;

/* A tensor map of a row-major matrix [rows, columns] of x, y or the codes. rows 0: M. */
typedef struct {
    enum source source;
    int rows, columns, box_rows, box_columns;
    int element_bytes, type, swizzle; /* type and swizzle: numbers of the CUDA driver */
} tensor_map;

/* A compiled kernel and how it is launched. The grid's dimension `token_axis` is multiplied by ceil(M / tokens), and the first
   dimension is then at most `most_blocks`, or exactly with stream_k. Workspace: `sums` and `counters` for each ceil(M / tokens);
   with stream_k, `sums` for each block, and a counter for each tile of the last, partial wave. */
typedef struct {
    const char *name, *tile;
    const unsigned char *cubin;
    int threads, shared_bytes, overlap;
    int tokens, grid[3], token_axis, most_blocks, stream_k;
    int64_t sums, counters;
    int parameter_count, map_count;
    const parameter *parameters;
    const tensor_map *maps;
} kernel;

/* Kernels from this number of rows on. */
typedef struct {
    int first_row, kernel;
} row_range;

typedef struct {
    int gpu, form, n, k, range_count;
    const row_range *ranges;
} choice;

typedef struct {
    const char *product;
    int major, minor;
} gpu;

extern const gpu gpus[];
extern const int gpu_count;
extern const int shapes[][2];
extern const int shape_count;
extern const kernel kernels[];
extern const int kernel_count;
extern const choice choices[];
extern const int choice_count;

/* How scales are stored. */
enum scaling { OF_CHANNELS, DIVIDED, SUBNORMAL };

enum zero_kind { NO_ZERO, INTEGER_ZERO, FLOAT_ZERO };

/* The scheme. `group` is that of the kernels, 0 for one scale per channel. Blocks of scales: 0 stands for all rows or columns. */
extern const struct {
    const char *name, *x_type;
    int bits;
    int is_float, mantissa, bias, offset; /* of the number format */
    int max_code, least, most;            /* largest code of a float; smallest and largest value of an integer */
    float max;                            /* largest value */
    enum zero_kind zero;
    int block_rows, block_columns, group;
    int scale_digits; /* 8: scales are bf16, 11: fp16 */
    int per_channel, may_be_subnormal;
} scheme;

/* For bit b of the code in row r and column c of a tile of 16 x 64: its place among the bits of the tile's words,
   [(r * 64 + c) * bits + b]. */
extern const uint16_t bit_places[];

#endif
