/*
 * The state file in this process: finding it, keeping it up to date, and what every call does first.
 */
#pragma once
#include "gpu.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum result {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18,
    MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25,
};

static struct state *shared;
static int shared_fd = -1;
static uint32_t sessions, seen_reloads;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void pause_s(double duration) {
    struct timespec span = {(time_t)duration, (long)((duration - floor(duration)) * 1e9)};
    nanosleep(&span, NULL);
}

/* Bring the GPU to the present. The file lock is the kernel's, so a process killed here leaves nothing locked. */
static void advance(struct gpu *gpu) {
    if (seconds() - gpu->updated < 0.01) return;
    pthread_mutex_lock(&lock);
    flock(shared_fd, LOCK_EX);
    double span = seconds() - gpu->updated;
    int steps = (int)fmin(fmax(span / 0.02, 1), 10000);
    if (span >= 0.01) {
        for (int i = 0; i < steps; i++) step(gpu, span / steps);
        gpu->updated += span;
    }
    flock(shared_fd, LOCK_UN);
    pthread_mutex_unlock(&lock);
}

static bool listed(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0)) return true;
    return false;
}

/* Map the state file. A mapping from before stays, because handles point into it. */
static int map_state(void) {
    const char *path = getenv("OPSD_SIMULATED_NVML");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return DRIVER_NOT_LOADED;
    struct stat info;
    struct state *map = MAP_FAILED;
    if (fstat(fd, &info) == 0 && (size_t)info.st_size == sizeof(struct state))
        map = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || map->magic != MAGIC || map->version != VERSION || map->size != sizeof(struct state)) {
        fprintf(stderr, "simulated NVML: %s is not a state file of layout %d\n", path, VERSION);
        if (map != MAP_FAILED) munmap(map, sizeof(struct state));
        close(fd);
        return LIB_RM_VERSION_MISMATCH;
    }
    shared = map;
    shared_fd = fd;
    return SUCCESS;
}

static int ready(void) {
    return sessions && seen_reloads == shared->reloads ? SUCCESS : UNINITIALIZED;
}

/* What every call about a GPU does first; `call` is the name of the NVML function. */
static int enter(struct gpu *gpu, const char *call) {
    int result = ready();
    if (result != SUCCESS) return result;
    if (!gpu) return INVALID_ARGUMENT;
    gpu->calls++;
    while (gpu->hang_until > seconds()) pause_s(0.02);
    if (gpu->lost) return GPU_IS_LOST;
    if (listed(gpu->denied, call)) return NO_PERMISSION;
    if (listed(gpu->unsupported, call)) return NOT_SUPPORTED;
    advance(gpu);
    return SUCCESS;
}

/* The MIG instance that a handle is of, NULL if it is of a whole GPU, which `gpu` becomes in either case. */
static struct mig *instance_at(void *handle, struct gpu **gpu) {
    *gpu = handle;
    for (unsigned i = 0; i < MAX_GPUS; i++) {
        struct gpu *parent = &shared->gpus[i];
        if ((char *)handle <= (char *)parent || (char *)handle >= (char *)(parent + 1)) continue;
        *gpu = parent;
        return handle;
    }
    return NULL;
}

/* Declares `gpu` and `mig`. */
#define ENTER_ANY(handle)                            \
    struct gpu *gpu;                                 \
    struct mig *mig = instance_at((handle), &gpu);   \
    ENTER(gpu)

#define ENTER(gpu)                              \
    do {                                        \
        int entered = enter((gpu), __func__);   \
        if (entered != SUCCESS) return entered; \
    } while (0)

#define GET(function, type, expression)       \
    int function(struct gpu *gpu, type *out) { \
        ENTER(gpu);                            \
        *out = (type)(expression);             \
        return SUCCESS;                        \
    }

#define TEXT(function, expression)                               \
    int function(struct gpu *gpu, char *out, unsigned length) {  \
        ENTER(gpu);                                              \
        snprintf(out, length, "%s", (expression));               \
        return SUCCESS;                                          \
    }

#define TEXT_OF(function, of_gpu, of_mig)                         \
    int function(void *handle, char *out, unsigned length) {      \
        ENTER_ANY(handle);                                        \
        snprintf(out, length, "%s", mig ? (of_mig) : (of_gpu));   \
        return SUCCESS;                                           \
    }

#define ABSENT(function)                                                   \
    int function(struct gpu *gpu) {                                        \
        ENTER(gpu);                                                        \
        return NOT_SUPPORTED;                                              \
    }
