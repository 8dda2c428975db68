/* Loads the CUDA driver once. */

#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

static driver loaded;
static const char *failed = "the CUDA driver was not loaded";
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* cuda.h renames some functions to a newer version, whose name ends with _v2. */
static const struct {
    const char *name;
    size_t place;
    int required;
} functions[] = {
#define FUNCTION(field, name, required) {name, offsetof(driver, field), required}
    FUNCTION(cuInit, "cuInit", 1),
    FUNCTION(cuGetErrorString, "cuGetErrorString", 1),
    FUNCTION(cuCtxGetDevice, "cuCtxGetDevice", 1),
    FUNCTION(cuDeviceGet, "cuDeviceGet", 1),
    FUNCTION(cuDeviceGetName, "cuDeviceGetName", 1),
    FUNCTION(cuDeviceGetAttribute, "cuDeviceGetAttribute", 1),
    FUNCTION(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 1),
    FUNCTION(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", 1),
    FUNCTION(cuCtxSetCurrent, "cuCtxSetCurrent", 1),
    FUNCTION(cuCtxSynchronize, "cuCtxSynchronize", 1),
    FUNCTION(cuMemAlloc, "cuMemAlloc_v2", 1),
    FUNCTION(cuMemFree, "cuMemFree_v2", 1),
    FUNCTION(cuMemcpyHtoD, "cuMemcpyHtoD_v2", 1),
    FUNCTION(cuMemcpyDtoH, "cuMemcpyDtoH_v2", 1),
    FUNCTION(cuMemsetD8, "cuMemsetD8_v2", 1),
    FUNCTION(cuModuleLoadData, "cuModuleLoadData", 1),
    FUNCTION(cuModuleUnload, "cuModuleUnload", 1),
    FUNCTION(cuModuleGetFunction, "cuModuleGetFunction", 1),
    FUNCTION(cuFuncSetAttribute, "cuFuncSetAttribute", 1),
    FUNCTION(cuFuncSetCacheConfig, "cuFuncSetCacheConfig", 1),
    FUNCTION(cuLaunchKernelEx, "cuLaunchKernelEx", 1),
    FUNCTION(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled", 0),
#undef FUNCTION
};

static void load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
        failed = "libcuda.so.1 was not found: install NVIDIA's driver";
        return;
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++) {
        void *address = dlsym(library, functions[i].name);
        if (address == NULL && functions[i].required) {
            failed = "NVIDIA's driver is too old: it must support CUDA 11.8 or newer";
            return;
        }
        *(void **)((char *)&loaded + functions[i].place) = address;
    }
    failed = loaded.cuInit(0) == 0 ? NULL : "NVIDIA's driver finds no GPU (cuInit)";
}

const driver *lowbit_driver(const char **why) {
    pthread_once(&once, load);
    *why = failed;
    return failed == NULL ? &loaded : NULL;
}
