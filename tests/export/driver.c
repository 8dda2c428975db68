/* Stands in for the CUDA driver in tests: has memory of the host for the GPU's, and prints launches as JSON instead of running
   them. The parameters' sizes of each cubin are registered before, as the driver would read them from the cubin. */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    struct {
        uint64_t id;
        uint32_t words[16];
    } *attributes;
    unsigned count;
} launch_config;

static struct {
    unsigned char *bytes;
    size_t size;
    int count, sizes[64];
} cubins[256];
static int cubin_count, shared_limit[256];

void register_cubin(const void *bytes, size_t size, int count, const int *sizes) {
    cubins[cubin_count].bytes = memcpy(malloc(size), bytes, size);
    cubins[cubin_count].size = size;
    cubins[cubin_count].count = count;
    memcpy(cubins[cubin_count++].sizes, sizes, (size_t)count * sizeof *sizes);
}

int cuInit(unsigned flags) { return (int)flags; }

int cuGetErrorString(int result, const char **text) {
    *text = result == 201 ? "invalid device context" : "another error";
    return 0;
}

int cuCtxGetDevice(int *device) {
    *device = 0;
    return getenv("NO_CONTEXT") == NULL ? 0 : 201;
}

int cuDeviceGetName(char *name, int size, int device) {
    (void)device;
    snprintf(name, (size_t)size, "%s", getenv("GPU_NAME"));
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    const char *capability = getenv("CAPABILITY");
    *value = attribute == 75 ? capability[0] - '0' : capability[1] - '0';
    return 0;
}

int cuModuleLoadData(void **module, const void *image) {
    for (int i = 0; i < cubin_count; i++)
        if (memcmp(image, cubins[i].bytes, cubins[i].size) == 0) {
            *module = &cubins[i];
            return 0;
        }
    return 200;
}

int cuModuleUnload(void *module) { return module == NULL; }

int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return name[0] == 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    int i = 0;
    while (&cubins[i] != function) i++;
    if (attribute == 8) shared_limit[i] = value;
    return 0;
}

int cuFuncSetCacheConfig(void *function, int config) { return function == NULL || config != 1; }

int cuTensorMapEncodeTiled(
    uint64_t *map, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
    const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    uint64_t values[16] = {
        (uint64_t)(uintptr_t)address, (uint64_t)type, sizes[0], sizes[1], strides[0], box[0], box[1], (uint64_t)swizzle};
    memcpy(map, values, sizeof values);
    return rank != 2 || steps[0] != 1 || steps[1] != 1 || interleave != 0 || promotion != 2 || fill != 0;
}

int cuLaunchKernelEx(const launch_config *config, void *function, void **parameters, void **extra) {
    int i = 0;
    while (&cubins[i] != function) i++;
    printf("{\"cubin\": %d, \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %u, \"limit\": %d, \"stream\": %" PRIu64
           ", \"attributes\": [", i, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->shared_bytes,
           shared_limit[i], (uint64_t)(uintptr_t)config->stream);
    for (unsigned a = 0; a < config->count; a++)
        printf("%s[%u, %u]", a ? ", " : "", (unsigned)config->attributes[a].id, config->attributes[a].words[0]);
    printf("], \"parameters\": [");
    for (int p = 0; p < cubins[i].count; p++) {
        printf("%s\"", p ? ", " : "");
        for (int b = 0; b < cubins[i].sizes[p]; b++) printf("%02x", ((unsigned char *)parameters[p])[b]);
        printf("\"");
    }
    printf("]}\n");
    fflush(stdout);
    return extra != NULL || config->block[1] != 1 || config->block[2] != 1;
}

/* Loaded by the launcher, used by the example alone. */
#define UNUSED(name) \
    int name(void) { return 1; }
UNUSED(cuDeviceGet)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuDevicePrimaryCtxRelease_v2)
UNUSED(cuCtxSetCurrent)
UNUSED(cuCtxSynchronize)
UNUSED(cuMemAlloc_v2)
UNUSED(cuMemFree_v2)
UNUSED(cuMemcpyHtoD_v2)
UNUSED(cuMemcpyDtoH_v2)
UNUSED(cuMemsetD8_v2)
