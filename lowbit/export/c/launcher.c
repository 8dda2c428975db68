/* Loads the kernels, chooses one by M and launches it. */

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "internal.h"
#include "lowbit_kernels.h"
#include "tables.h"

#define ALIGNED 256
#define MOST_PARAMETERS 48
#define MOST_MAPS 6

struct lowbit_library {
    const driver *cuda;
    int gpu;
    CUmodule *modules;
    CUfunction *functions;
    size_t *counter_bytes; /* of each choice, for all M: counters start the workspace at a place that M does not change */
};

static _Thread_local char message[512];

const char *lowbit_message(void) { return message; }

int lowbit_failed(int error, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return error;
}

const char *lowbit_scheme(void) { return scheme.name; }

const char *lowbit_x_type(void) { return scheme.x_type; }

int lowbit_shapes(void) { return shape_count; }

int lowbit_shape(int i, int *n, int *k) {
    if (i < 0 || i >= shape_count) return lowbit_failed(LOWBIT_UNSUPPORTED, "shapes have numbers below %d, not %d", shape_count, i);
    *n = shapes[i][0];
    *k = shapes[i][1];
    return LOWBIT_OK;
}

int lowbit_check_shape(int n, int k) {
    for (int i = 0; i < shape_count; i++)
        if (shapes[i][0] == n && shapes[i][1] == k) return LOWBIT_OK;
    return lowbit_failed(LOWBIT_UNSUPPORTED, "this library has no kernels for %d x %d: export with --shape %dx%d", n, k, n, k);
}

static size_t aligned(size_t bytes) { return (bytes + ALIGNED - 1) / ALIGNED * ALIGNED; }

/* The launch of a kernel for M rows: grid and workspace. */
static lowbit_launch launch_of(const kernel *of, int m) {
    int tiles = (m + of->tokens - 1) / of->tokens;
    lowbit_launch launch = {of->name, of->tile, {of->grid[0], of->grid[1], of->grid[2]}, of->threads, of->shared_bytes, 0, 0};
    launch.grid[of->token_axis] *= tiles;
    int of_tiles = launch.grid[0];
    if (of->stream_k || launch.grid[0] > of->most_blocks) launch.grid[0] = of->most_blocks;
    size_t each = of->stream_k ? (size_t)launch.grid[0] : (size_t)tiles;
    launch.sums = each * (size_t)of->sums;
    launch.counters = of->stream_k ? (size_t)(of_tiles % launch.grid[0]) : each * (size_t)of->counters;
    return launch;
}

static const choice *choice_of(int of_gpu, int form, int n, int k) {
    for (int i = 0; i < choice_count; i++)
        if (choices[i].gpu == of_gpu && choices[i].form == form && choices[i].n == n && choices[i].k == k) return &choices[i];
    return NULL;
}

/* The kernel for M rows: that of the last range that starts at or before M. */
static int kernel_for(const choice *of, int m) {
    int low = 0, high = of->range_count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (of->ranges[middle].first_row <= m)
            low = middle;
        else
            high = middle - 1;
    }
    return of->ranges[low].kernel;
}

static int gpu_of(const char *product) {
    for (int i = 0; i < gpu_count; i++)
        if (strcmp(gpus[i].product, product) == 0) return i;
    return -1;
}

int lowbit_choose(const char *product, int form, int m, int n, int k, lowbit_launch *launch) {
    int of_gpu = gpu_of(product);
    const choice *of = of_gpu < 0 ? NULL : choice_of(of_gpu, form, n, k);
    if (of == NULL || m < 1 || m > LOWBIT_MOST_ROWS)
        return lowbit_failed(
            LOWBIT_UNSUPPORTED, "this library has no kernel for %s, form %d, M %d, N %d, K %d", product, form, m, n, k);
    *launch = launch_of(&kernels[kernel_for(of, m)], m);
    return LOWBIT_OK;
}

static int driver_failed(const driver *cuda, CUresult result, const char *function) {
    const char *text = NULL;
    cuda->cuGetErrorString(result, &text);
    return lowbit_failed(LOWBIT_DRIVER, "%s: %s (%d)", function, text == NULL ? "unknown error" : text, result);
}

#define TRY(call)                                                          \
    do {                                                                   \
        CUresult result_ = cuda->call;                                     \
        if (result_ != 0) return driver_failed(cuda, result_, #call);      \
    } while (0)

/* Finds the kernels of the current context's GPU: by its name, or else by its compute capability. */
static int find_gpu(const driver *cuda, int *found) {
    CUdevice device;
    char name[128] = "";
    int major, minor;
    TRY(cuCtxGetDevice(&device));
    TRY(cuDeviceGetName(name, (int)sizeof name - 1, device));
    TRY(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    TRY(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    *found = gpu_of(strncmp(name, "NVIDIA ", 7) == 0 ? name + 7 : name);
    for (int i = 0; i < gpu_count && *found < 0; i++)
        if (gpus[i].major == major && gpus[i].minor == minor) *found = i;
    if (*found >= 0) return LOWBIT_OK;
    return lowbit_failed(
        LOWBIT_UNSUPPORTED, "this library has no kernels for %s (compute capability %d.%d): export with --gpu", name, major, minor);
}

static int load_kernel(const driver *cuda, const kernel *of, CUmodule *module, CUfunction *function) {
    TRY(cuModuleLoadData(module, of->cubin));
    TRY(cuModuleGetFunction(function, *module, of->name));
    if (of->shared_bytes > 48 * 1024) {
        TRY(cuFuncSetCacheConfig(*function, CU_FUNC_CACHE_PREFER_SHARED));
        TRY(cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, of->shared_bytes));
    }
    return LOWBIT_OK;
}

static int load_kernels(lowbit_library *library) {
    for (int i = 0; i < choice_count; i++) {
        if (choices[i].gpu != library->gpu) continue;
        size_t most = 0;
        for (int m = 1; m <= LOWBIT_MOST_ROWS; m++) {
            size_t counters = launch_of(&kernels[kernel_for(&choices[i], m)], m).counters;
            most = counters > most ? counters : most;
        }
        library->counter_bytes[i] = aligned(most * sizeof(int32_t));
        for (int r = 0; r < choices[i].range_count; r++) {
            int index = choices[i].ranges[r].kernel;
            if (library->functions[index] != NULL) continue;
            int error = load_kernel(library->cuda, &kernels[index], &library->modules[index], &library->functions[index]);
            if (error != LOWBIT_OK) return error;
        }
    }
    return LOWBIT_OK;
}

int lowbit_open(lowbit_library **opened) {
    const char *why;
    const driver *cuda = lowbit_driver(&why);
    if (cuda == NULL) return lowbit_failed(LOWBIT_DRIVER, "%s", why);
    int found = -1, error = find_gpu(cuda, &found);
    if (error != LOWBIT_OK) return error;
    if (gpus[found].major >= 9 && cuda->cuTensorMapEncodeTiled == NULL)
        return lowbit_failed(LOWBIT_DRIVER, "NVIDIA's driver is too old for %s: it must support CUDA 12", gpus[found].product);
    lowbit_library *library = calloc(1, sizeof *library);
    if (library == NULL) return lowbit_failed(LOWBIT_DRIVER, "no memory");
    library->cuda = cuda;
    library->gpu = found;
    library->modules = calloc((size_t)kernel_count, sizeof *library->modules);
    library->functions = calloc((size_t)kernel_count, sizeof *library->functions);
    library->counter_bytes = calloc((size_t)choice_count, sizeof *library->counter_bytes);
    if (library->modules == NULL || library->functions == NULL || library->counter_bytes == NULL)
        error = lowbit_failed(LOWBIT_DRIVER, "no memory");
    else
        error = load_kernels(library);
    if (error != LOWBIT_OK) {
        lowbit_close(library);
        return error;
    }
    *opened = library;
    return LOWBIT_OK;
}

void lowbit_close(lowbit_library *library) {
    if (library == NULL) return;
    for (int i = 0; i < kernel_count && library->modules != NULL; i++)
        if (library->modules[i] != NULL) library->cuda->cuModuleUnload(library->modules[i]);
    free(library->modules);
    free(library->functions);
    free(library->counter_bytes);
    free(library);
}

const char *lowbit_product(const lowbit_library *library) { return gpus[library->gpu].product; }

size_t lowbit_workspace_bytes(const lowbit_library *library, int n, int k, int m) {
    size_t most = 0;
    if (m > LOWBIT_MOST_ROWS) m = LOWBIT_MOST_ROWS;
    for (int i = 0; i < choice_count; i++) {
        if (choices[i].gpu != library->gpu || choices[i].n != n || choices[i].k != k) continue;
        for (int rows = 1; rows <= m; rows++) {
            size_t sums = launch_of(&kernels[kernel_for(&choices[i], rows)], rows).sums;
            size_t bytes = library->counter_bytes[i] + aligned(sums * sizeof(float));
            most = bytes > most ? bytes : most;
        }
        most = most == 0 ? ALIGNED : most;
    }
    return most;
}

typedef struct {
    CUdeviceptr y, x, codes, scale, channel_scale, counters, sums;
    int m;
} operands;

static int encode_map(const driver *cuda, const tensor_map *of, const operands *on, CUtensorMap *map) {
    CUdeviceptr base = of->source == FROM_X ? on->x : of->source == FROM_Y ? on->y : on->codes;
    uint64_t sizes[2] = {(uint64_t)of->columns, (uint64_t)(of->rows == 0 ? on->m : of->rows)};
    uint64_t strides[1] = {(uint64_t)of->columns * (uint64_t)of->element_bytes};
    uint32_t box[2] = {(uint32_t)of->box_columns, (uint32_t)of->box_rows}, steps[2] = {1, 1};
    TRY(cuTensorMapEncodeTiled(
        map, of->type, 2, (void *)(uintptr_t)base, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, of->swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return LOWBIT_OK;
}

static uint64_t value_of(const parameter *of, const operands *on, const kernel *what) {
    switch (of->source) {
    case FROM_Y: return on->y;
    case FROM_X: return on->x;
    case FROM_CODES: return on->codes;
    case FROM_SCALE: return on->scale;
    case FROM_CHANNEL_SCALE: return on->channel_scale;
    case FROM_SUMS: return on->sums;
    case FROM_COUNTERS: return on->counters;
    case FROM_M: return (uint64_t)on->m;
    case FROM_TOKEN_TILES: return (uint64_t)((on->m + what->tokens - 1) / what->tokens);
    case FROM_INT:
    case FROM_FLOAT: return (uint32_t)of->value;
    case FROM_LONG: return (uint64_t)of->value;
    default: return 0; /* FROM_NULL, and FROM_MAP, which has no such value */
    }
}

static int launch(const driver *cuda, CUfunction function, const kernel *of, const operands *on, CUstream stream) {
    uint64_t values[MOST_PARAMETERS]; /* the driver reads as many of the bytes as the parameter has: Linux is little-endian */
    void *addresses[MOST_PARAMETERS];
    CUtensorMap maps[MOST_MAPS];
    for (int i = 0; i < of->map_count; i++) {
        int error = encode_map(cuda, &of->maps[i], on, &maps[i]);
        if (error != LOWBIT_OK) return error;
    }
    for (int i = 0; i < of->parameter_count; i++) {
        const parameter *each = &of->parameters[i];
        values[i] = value_of(each, on, of);
        addresses[i] = each->source == FROM_MAP ? (void *)&maps[each->value] : (void *)&values[i];
    }
    lowbit_launch how = launch_of(of, on->m);
    CUlaunchAttribute overlap;
    memset(&overlap, 0, sizeof overlap);
    overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlap.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {
        (unsigned)how.grid[0], (unsigned)how.grid[1], (unsigned)how.grid[2], (unsigned)how.threads, 1, 1,
        (unsigned)how.shared_bytes, stream, &overlap, of->overlap ? 1u : 0u};
    TRY(cuLaunchKernelEx(&config, function, addresses, NULL));
    return LOWBIT_OK;
}

int lowbit_multiply(
    lowbit_library *library, lowbit_address y, lowbit_address x, lowbit_address weight, int form, lowbit_address workspace, int m,
    int n, int k, void *stream) {
    const choice *of = choice_of(library->gpu, form, n, k);
    if (of == NULL) {
        int error = lowbit_check_shape(n, k);
        return error != LOWBIT_OK ? error : lowbit_failed(LOWBIT_UNSUPPORTED, "%s has no form %d (lowbit_pack)", scheme.name, form);
    }
    if (m < 0) return lowbit_failed(LOWBIT_UNSUPPORTED, "M is at least 0, not %d", m);
    if (y % 16 || x % 16 || weight % ALIGNED || workspace % ALIGNED)
        return lowbit_failed(
            LOWBIT_UNSUPPORTED, "x and y start at multiples of 16 bytes, weight and workspace at multiples of %d", ALIGNED);
    weight_layout at = lowbit_layout(n, k);
    size_t counters = library->counter_bytes[of - choices];
    operands on = {y, x, weight, weight + at.scale, weight + at.channel_scale, workspace, workspace + counters, 0};
    if (lowbit_groups(k) == 0) on.scale = weight;
    while (m > 0) {
        on.m = m < LOWBIT_MOST_ROWS ? m : LOWBIT_MOST_ROWS;
        int index = kernel_for(of, on.m);
        int error = launch(library->cuda, library->functions[index], &kernels[index], &on, stream);
        if (error != LOWBIT_OK) return error;
        on.y += 2u * (uint64_t)on.m * (uint64_t)n;
        on.x += 2u * (uint64_t)on.m * (uint64_t)k;
        m -= on.m;
    }
    return LOWBIT_OK;
}
