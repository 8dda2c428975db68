/* What launcher.c and pack.c share. */

#ifndef LOWBIT_INTERNAL_H
#define LOWBIT_INTERNAL_H

#include <stddef.h>

/* Sets the thread's message and returns `error`. */
int lowbit_failed(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* LOWBIT_OK for a shape of the library. */
int lowbit_check_shape(int n, int k);

/* Offsets in bytes of a packed weight's scales and scales of channels, and its size. Codes start at 0. */
typedef struct {
    size_t scale, channel_scale, bytes;
} weight_layout;
weight_layout lowbit_layout(int n, int k);

/* Groups of scales along K, padded to whole blocks of 128 columns. */
int lowbit_groups(int k);

#endif
