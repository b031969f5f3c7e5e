/*
 * A simulated libnvidia-ml.so.1: the calls of NVML that opsd and nvitop-exporter make, answered from a shared file.
 *
 * The file named by OPSD_SIMULATED_NVML holds one `struct state`, mirrored by opsd/simulated/gpus.py: whoever drives
 * the simulation writes the upper part of `struct gpu`, this library the lower part. It runs in any number of
 * processes at once, which see each change immediately; what a call sets (the power limit) stays set.
 *
 * Physics, deterministic in (time, inputs): the die follows ambient + power * resistance / cooling with time constant
 * `tau`. Above SW_SLOWDOWN_C the software thermal controller takes power (and clock) away until the temperature holds;
 * above HW_SLOWDOWN_C the hardware halves them. Worse cooling therefore throttles, a lower power limit cures it.
 *
 * Struct layouts, return codes and field numbers are those of NVIDIA's public nvml.h (drivers 570, 575, 580).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 0x4453504f, VERSION = 1, MAX_GPUS = 16, LINKS = 18, PROCESSES = 8, XIDS = 16 };

enum result {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18,
};

enum reason {
    IDLE = 0x1, SW_POWER_CAP = 0x4, HW_SLOWDOWN = 0x8, SYNC_BOOST = 0x10, SW_THERMAL = 0x20, HW_THERMAL = 0x40,
    POWER_BRAKE = 0x80,
};

enum { COUNTER_POWER_CAP, COUNTER_SYNC_BOOST, COUNTER_SW_THERMAL, COUNTER_HW_THERMAL, COUNTER_POWER_BRAKE, COUNTERS };
static const uint32_t COUNTER_REASON[COUNTERS] = {SW_POWER_CAP, SYNC_BOOST, SW_THERMAL, HW_THERMAL, POWER_BRAKE};

static const double SW_SLOWDOWN_C = 87, HW_SLOWDOWN_C = 90, SHUTDOWN_C = 95, MEMORY_MAX_C = 95;
static const double RESISTANCE_C_PER_W = 0.055, IDLE_W = 70, MIN_LIMIT_W = 200, MAX_LIMIT_W = 700;
static const double MAX_SM_MHZ = 1980, IDLE_SM_MHZ = 345, MEMORY_MHZ = 2619;
static const double THROTTLE_PER_S = 0.2, RECOVER_PER_S = 0.1, MIN_SCALE = 0.2;

struct gpu {
    /* Written by whoever drives the simulation. */
    char uuid[64], name[64], bus_id[32], serial[32], vbios[32];
    char unsupported[512]; /* names of calls and numbers of fields, each between spaces */
    char denied[256];      /* names of calls that answer NO_PERMISSION, likewise */
    double utilization, memory_utilization, demand_w, cooling, ambient_c, tau_s, link_kib_per_s, hang_until;
    uint64_t memory_total, memory_used, memory_reserved;
    uint64_t ecc[2][2]; /* [volatile, aggregate][corrected, uncorrected] */
    uint64_t link_errors[3][LINKS]; /* [replay, recovery, CRC] */
    uint64_t process_memory[PROCESSES];
    uint32_t process_pid[PROCESSES];
    uint32_t link_active[LINKS];
    uint32_t remapped[4]; /* correctable, uncorrectable, pending, failure */
    uint32_t pcie_gen, pcie_width, pcie_replays, recovery_action, persistence, lost, forced_reasons, counters_work;
    uint32_t xid[XIDS], xid_count;
    uint32_t padding;
    /* Written by this library. */
    double limit_w, updated, temperature_c, power_w, scale, energy_mj, link_kib;
    uint64_t counter_ns[COUNTERS];
    uint64_t calls, blocking_calls;
    uint32_t reasons, sm_mhz;
};

struct state {
    uint32_t magic, version;
    uint64_t size;
    uint32_t count, driver, init_error, reloads;
    struct gpu gpus[MAX_GPUS];
};

static struct state *shared;
static int shared_fd = -1;
static uint32_t seen_reloads;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* What tells opsd that the GPUs are simulated; also the size of the layout, for the test of its mirror. */
uint64_t opsd_simulated_nvml(void) { return sizeof(struct state); }

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void pause_s(double duration) {
    struct timespec span = {(time_t)duration, (long)((duration - floor(duration)) * 1e9)};
    nanosleep(&span, NULL);
}

/* ---- physics ---- */

static uint32_t active_reasons(const struct gpu *gpu) {
    uint32_t reasons = gpu->forced_reasons;
    if (gpu->utilization <= 0) reasons |= IDLE;
    if (gpu->demand_w > gpu->limit_w) reasons |= SW_POWER_CAP;
    if (gpu->scale < 1) reasons |= SW_THERMAL;
    if (gpu->temperature_c >= HW_SLOWDOWN_C) reasons |= HW_THERMAL;
    if (reasons & (HW_THERMAL | POWER_BRAKE)) reasons |= HW_SLOWDOWN;
    return reasons;
}

static void step(struct gpu *gpu, double dt) {
    if (gpu->temperature_c >= SW_SLOWDOWN_C) gpu->scale = fmax(MIN_SCALE, gpu->scale - THROTTLE_PER_S * dt);
    else if (gpu->temperature_c < SW_SLOWDOWN_C - 1) gpu->scale = fmin(1, gpu->scale + RECOVER_PER_S * dt);
    gpu->reasons = active_reasons(gpu);

    double wanted = fmax(gpu->demand_w - IDLE_W, 0);
    double given = fmin(wanted, gpu->limit_w - IDLE_W) * gpu->scale;
    if (gpu->reasons & HW_SLOWDOWN) given /= 2;
    gpu->power_w = IDLE_W + given;
    /* Dynamic power goes with clock * voltage^2, about clock^2.4 in the upper range. */
    double clock = wanted > 0 ? MAX_SM_MHZ * pow(given / wanted, 1 / 2.4) : MAX_SM_MHZ;
    gpu->sm_mhz = (uint32_t)(gpu->reasons & IDLE ? IDLE_SM_MHZ : fmax(clock, IDLE_SM_MHZ));

    double target = gpu->ambient_c + gpu->power_w * RESISTANCE_C_PER_W / fmax(gpu->cooling, 0.01);
    gpu->temperature_c = target + (gpu->temperature_c - target) * exp(-dt / gpu->tau_s);
    gpu->energy_mj += gpu->power_w * dt * 1e3;
    gpu->link_kib += gpu->link_kib_per_s * dt;
    for (int i = 0; i < COUNTERS; i++)
        if (gpu->reasons & COUNTER_REASON[i]) gpu->counter_ns[i] += (uint64_t)(dt * 1e9);
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

/* ---- life of the library ---- */

static bool listed(const char *list, const char *word) {
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0)) return true;
    return false;
}

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

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int result = shared ? SUCCESS : map_state();
    if (result == SUCCESS) result = (int)shared->init_error;
    if (result == SUCCESS) seen_reloads = shared->reloads;
    return result;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
/* Handles point into the mapping; it stays, so that a late call answers instead of crashing. */
int nvmlShutdown(void) { return shared ? SUCCESS : UNINITIALIZED; }

static int ready(void) {
    if (!shared || seen_reloads != shared->reloads) return UNINITIALIZED;
    return SUCCESS;
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

#define ABSENT(function)                                                   \
    int function(struct gpu *gpu) {                                        \
        ENTER(gpu);                                                        \
        return NOT_SUPPORTED;                                              \
    }

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

static const char *driver_version(void) {
    return shared->driver <= 570 ? "570.172.08" : shared->driver <= 575 ? "575.57.08" : "580.95.05";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    snprintf(out, length, "%s", driver_version());
    return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *out, unsigned length) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    snprintf(out, length, "12.%s", driver_version());
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    *out = shared && shared->driver >= 580 ? 13000 : shared && shared->driver >= 575 ? 12090 : 12080;
    return ready();
}

int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

/* ---- devices ---- */

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    *out = shared->count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **out) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    if (index >= shared->count) return INVALID_ARGUMENT;
    *out = &shared->gpus[index];
    return shared->gpus[index].lost ? GPU_IS_LOST : SUCCESS;
}

static int find(const char *text, size_t offset, struct gpu **out) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    for (unsigned i = 0; i < shared->count; i++)
        if (strcmp((char *)&shared->gpus[i] + offset, text) == 0) return nvmlDeviceGetHandleByIndex_v2(i, out);
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **out) {
    return find(uuid, offsetof(struct gpu, uuid), out);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct gpu **out) {
    return find(bus_id, offsetof(struct gpu, bus_id), out);
}

TEXT(nvmlDeviceGetName, gpu->name)
TEXT(nvmlDeviceGetUUID, gpu->uuid)
TEXT(nvmlDeviceGetSerial, gpu->serial)
TEXT(nvmlDeviceGetVbiosVersion, gpu->vbios)
GET(nvmlDeviceGetIndex, unsigned, gpu - shared->gpus)
GET(nvmlDeviceGetMinorNumber, unsigned, gpu - shared->gpus)
GET(nvmlDeviceGetPersistenceMode, unsigned, gpu->persistence)
GET(nvmlDeviceGetPerformanceState, unsigned, 0)
GET(nvmlDeviceGetComputeMode, unsigned, 0)
GET(nvmlDeviceGetDisplayActive, unsigned, 0)
GET(nvmlDeviceGetDisplayMode, unsigned, 0)
ABSENT(nvmlDeviceGetFanSpeed)
ABSENT(nvmlDeviceGetDriverModel_v2)
ABSENT(nvmlDeviceGetMigMode)
ABSENT(nvmlDeviceGetRetiredPages)

int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *out) {
    ENTER(gpu);
    *out = 0;
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(struct gpu *gpu, unsigned *out) {
    ENTER(gpu);
    *out = 0;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct gpu *gpu, int *major, int *minor) {
    ENTER(gpu);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

struct pci {
    char legacy_bus_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *out) {
    ENTER(gpu);
    memset(out, 0, sizeof *out);
    sscanf(gpu->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "%.15s", gpu->bus_id + 4);
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", gpu->bus_id);
    out->device_id = 0x233010de;
    return SUCCESS;
}

GET(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, gpu->pcie_gen)
GET(nvmlDeviceGetCurrPcieLinkWidth, unsigned, gpu->pcie_width)
GET(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
GET(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
GET(nvmlDeviceGetPcieReplayCounter, unsigned, gpu->pcie_replays)

/* The real call samples for 20 ms and blocks its caller meanwhile. */
int nvmlDeviceGetPcieThroughput(struct gpu *gpu, int direction, unsigned *out) {
    ENTER(gpu);
    (void)direction;
    gpu->blocking_calls++;
    pause_s(0.02);
    *out = 0;
    return SUCCESS;
}

/* ---- load, power, temperature ---- */

struct utilization { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, struct utilization *out) {
    ENTER(gpu);
    out->gpu = (unsigned)gpu->utilization;
    out->memory = (unsigned)gpu->memory_utilization;
    return SUCCESS;
}

int nvmlDeviceGetEncoderUtilization(struct gpu *gpu, unsigned *out, unsigned *period_us) {
    ENTER(gpu);
    *out = 0;
    *period_us = 167000;
    return SUCCESS;
}

int nvmlDeviceGetDecoderUtilization(struct gpu *gpu, unsigned *out, unsigned *period_us) {
    ENTER(gpu);
    *out = 0;
    *period_us = 167000;
    return SUCCESS;
}

struct memory_v1 { uint64_t total, free, used; };
struct memory_v2 { unsigned version; uint64_t total, reserved, free, used; };

static uint64_t memory_free(const struct gpu *gpu) {
    uint64_t taken = gpu->memory_used + gpu->memory_reserved;
    return taken < gpu->memory_total ? gpu->memory_total - taken : 0;
}

int nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory_v1 *out) {
    ENTER(gpu);
    *out = (struct memory_v1){gpu->memory_total, memory_free(gpu), gpu->memory_used + gpu->memory_reserved};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory_v2 *out) {
    ENTER(gpu);
    *out = (struct memory_v2){out->version, gpu->memory_total, gpu->memory_reserved, memory_free(gpu), gpu->memory_used};
    return SUCCESS;
}

int nvmlDeviceGetBAR1MemoryInfo(struct gpu *gpu, struct memory_v1 *out) {
    ENTER(gpu);
    *out = (struct memory_v1){128ull << 30, (128ull << 30) - (1 << 20), 1 << 20};
    return SUCCESS;
}

/* Clock types: 0 graphics, 1 SM, 2 memory, 3 video. */
int nvmlDeviceGetClockInfo(struct gpu *gpu, int type, unsigned *out) {
    ENTER(gpu);
    *out = type == 2 ? (unsigned)MEMORY_MHZ : type == 3 ? (unsigned)(gpu->sm_mhz * 0.9) : gpu->sm_mhz;
    return type >= 0 && type <= 3 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetMaxClockInfo(struct gpu *gpu, int type, unsigned *out) {
    ENTER(gpu);
    *out = type == 2 ? (unsigned)MEMORY_MHZ : (unsigned)MAX_SM_MHZ;
    return type >= 0 && type <= 3 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, unsigned *out) {
    ENTER(gpu);
    *out = (unsigned)gpu->temperature_c;
    return sensor == 0 ? SUCCESS : INVALID_ARGUMENT;
}

struct temperature { unsigned version; int sensor, celsius; };

int nvmlDeviceGetTemperatureV(struct gpu *gpu, struct temperature *out) {
    ENTER(gpu);
    out->celsius = (int)gpu->temperature_c;
    return SUCCESS;
}

struct margin { unsigned version; int celsius; };

int nvmlDeviceGetMarginTemperature(struct gpu *gpu, struct margin *out) {
    ENTER(gpu);
    out->celsius = (int)(SW_SLOWDOWN_C - gpu->temperature_c);
    return SUCCESS;
}

/* Thresholds: 0 shutdown, 1 slowdown, 2 memory maximum, 3 GPU maximum. */
int nvmlDeviceGetTemperatureThreshold(struct gpu *gpu, int type, unsigned *out) {
    ENTER(gpu);
    const double thresholds[] = {SHUTDOWN_C, HW_SLOWDOWN_C, MEMORY_MAX_C, SW_SLOWDOWN_C};
    if (type < 0 || type > 3) return NOT_SUPPORTED;
    *out = (unsigned)thresholds[type];
    return SUCCESS;
}

GET(nvmlDeviceGetPowerUsage, unsigned, gpu->power_w * 1e3)
GET(nvmlDeviceGetPowerManagementLimit, unsigned, gpu->limit_w * 1e3)
GET(nvmlDeviceGetEnforcedPowerLimit, unsigned, gpu->limit_w * 1e3)
GET(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, MAX_LIMIT_W * 1e3)
GET(nvmlDeviceGetTotalEnergyConsumption, uint64_t, gpu->energy_mj)
GET(nvmlDeviceGetCurrentClocksEventReasons, uint64_t, gpu->reasons)
GET(nvmlDeviceGetCurrentClocksThrottleReasons, uint64_t, gpu->reasons)
GET(nvmlDeviceGetSupportedClocksEventReasons, uint64_t, 0x1ff)

int nvmlDeviceGetPowerManagementLimitConstraints(struct gpu *gpu, unsigned *low, unsigned *high) {
    ENTER(gpu);
    *low = (unsigned)(MIN_LIMIT_W * 1e3);
    *high = (unsigned)(MAX_LIMIT_W * 1e3);
    return SUCCESS;
}

int nvmlDeviceSetPowerManagementLimit(struct gpu *gpu, unsigned milliwatts) {
    ENTER(gpu);
    double watts = milliwatts / 1e3;
    if (watts < MIN_LIMIT_W || watts > MAX_LIMIT_W) return INVALID_ARGUMENT;
    gpu->limit_w = watts;
    return SUCCESS;
}

/* ---- errors ---- */

/* Error types: 0 corrected, 1 uncorrected. Counters: 0 volatile, 1 aggregate. */
int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, unsigned type, unsigned counter, uint64_t *out) {
    ENTER(gpu);
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *out = gpu->ecc[counter][type];
    return SUCCESS;
}

int nvmlDeviceGetEccMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu);
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *cor, unsigned *unc, unsigned *pending, unsigned *failure) {
    ENTER(gpu);
    *cor = gpu->remapped[0];
    *unc = gpu->remapped[1];
    *pending = gpu->remapped[2];
    *failure = gpu->remapped[3];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *out) {
    ENTER(gpu);
    if (link >= LINKS) return INVALID_ARGUMENT;
    *out = gpu->link_active[link];
    return SUCCESS;
}

/* ---- field values ---- */

struct field {
    uint32_t id, scope;
    int64_t timestamp, latency;
    int32_t type, result;
    union {
        double real;
        uint32_t u32;
        uint64_t u64;
    } value;
};

enum { TYPE_U32 = 1, TYPE_U64 = 3 };
enum { ALL_LINKS = 0xffffffff };

static int answer(struct field *field, int type, uint64_t value) {
    field->type = type;
    if (type == TYPE_U32) field->value.u32 = (uint32_t)value;
    else field->value.u64 = value;
    return SUCCESS;
}

static uint64_t sum(const uint64_t *values) {
    uint64_t total = 0;
    for (int i = 0; i < LINKS; i++) total += values[i];
    return total;
}

static int link_field(const struct gpu *gpu, struct field *field) {
    uint32_t id = field->id, link = field->scope;
    bool throughput = id >= 138 && id <= 141;
    if (throughput && link == ALL_LINKS) return answer(field, TYPE_U64, (uint64_t)gpu->link_kib);
    if (link >= LINKS) return INVALID_ARGUMENT;
    if (throughput) return answer(field, TYPE_U64, (uint64_t)(gpu->link_kib / LINKS));
    if (id <= 163) return answer(field, TYPE_U64, gpu->link_errors[id - 161][link]);
    if (id == 164) return answer(field, TYPE_U32, gpu->link_active[link] ? 26562 : 0);
    if (id == 165) return answer(field, TYPE_U32, gpu->link_active[link]);
    return answer(field, TYPE_U32, 5);
}

/*
 * The cumulative throttle counters moved twice: a 570 driver has power smoothing from 251 to 268 and no counters for
 * the thermal reasons, the 12.9 headers (575) put the counters at 251 to 253, later ones at 269 to 271 so that power
 * smoothing has its old numbers again. Power smoothing answers here, to trap whoever trusts the number alone.
 */
static int late_field(const struct gpu *gpu, struct field *field) {
    uint32_t driver = shared->driver, id = field->id;
    uint32_t first = driver >= 580 ? 269 : 251, last = driver >= 580 ? 308 : driver >= 575 ? 273 : 268;
    if (id > last) return INVALID_ARGUMENT;
    if (driver < 575 || id < first || id > first + 2) return answer(field, TYPE_U32, 1);
    if (!gpu->counters_work) return NOT_SUPPORTED;
    return answer(field, TYPE_U64, gpu->counter_ns[COUNTER_SW_THERMAL + id - first]);
}

static int field_value(const struct gpu *gpu, struct field *field) {
    char number[16];
    snprintf(number, sizeof number, "%u", field->id);
    if (listed(gpu->unsupported, number)) return NOT_SUPPORTED;
    switch (field->id) {
    case 1: case 2: return answer(field, TYPE_U32, 1);
    case 3: case 4: case 5: case 6: return answer(field, TYPE_U64, gpu->ecc[(field->id - 3) / 2][(field->id - 3) % 2]);
    case 38: case 45: return answer(field, TYPE_U64, sum(gpu->link_errors[2]));
    case 52: return answer(field, TYPE_U64, sum(gpu->link_errors[0]));
    case 59: return answer(field, TYPE_U64, sum(gpu->link_errors[1]));
    case 74: return gpu->counters_work ? answer(field, TYPE_U64, gpu->counter_ns[COUNTER_POWER_CAP]) : NOT_SUPPORTED;
    case 75: return gpu->counters_work ? answer(field, TYPE_U64, gpu->counter_ns[COUNTER_SW_THERMAL]) : NOT_SUPPORTED;
    case 76: return gpu->counters_work ? answer(field, TYPE_U64, gpu->counter_ns[COUNTER_SYNC_BOOST]) : NOT_SUPPORTED;
    case 82: return answer(field, TYPE_U32, (uint64_t)(gpu->ambient_c + (gpu->temperature_c - gpu->ambient_c) * 1.1));
    case 83: return answer(field, TYPE_U64, (uint64_t)gpu->energy_mj);
    case 91: return answer(field, TYPE_U32, LINKS);
    case 94: return answer(field, TYPE_U32, gpu->pcie_replays);
    case 138: case 139: case 140: case 141: return link_field(gpu, field);
    case 142: case 143: case 144: case 145: return answer(field, TYPE_U32, gpu->remapped[field->id - 142]);
    case 161: case 162: case 163: case 164: case 165: case 166: return link_field(gpu, field);
    case 185: case 186: return answer(field, TYPE_U32, (uint64_t)(gpu->power_w * 1e3));
    case 187: return answer(field, TYPE_U32, (uint64_t)(MIN_LIMIT_W * 1e3));
    case 188: case 189: return answer(field, TYPE_U32, (uint64_t)(MAX_LIMIT_W * 1e3));
    case 190: case 192: return answer(field, TYPE_U32, (uint64_t)(gpu->limit_w * 1e3));
    case 230: return answer(field, TYPE_U32, gpu->recovery_action);
    default: return field->id >= 251 ? late_field(gpu, field) : NOT_SUPPORTED;
    }
}

int nvmlDeviceGetFieldValues(struct gpu *gpu, int count, struct field *fields) {
    ENTER(gpu);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
        fields[i].result = field_value(gpu, &fields[i]);
    }
    return SUCCESS;
}

/* ---- processes ---- */

struct process { unsigned pid; uint64_t memory; unsigned gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, unsigned *count, struct process *out) {
    ENTER(gpu);
    unsigned found = 0, room = *count;
    for (int i = 0; i < PROCESSES; i++) {
        if (!gpu->process_pid[i]) continue;
        if (found < room && out)
            out[found] = (struct process){gpu->process_pid[i], gpu->process_memory[i], 0xffffffff, 0xffffffff};
        found++;
    }
    *count = found;
    return found > room || (found && !out) ? INSUFFICIENT_SIZE : SUCCESS;
}

static int no_processes(struct gpu *gpu, unsigned *count) {
    ENTER(gpu);
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct gpu *gpu, unsigned *count) { return no_processes(gpu, count); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct gpu *gpu, unsigned *count) { return no_processes(gpu, count); }
/* Its presence tells clients that struct process has the layout above (drivers from 550 on). */
ABSENT(nvmlDeviceGetRunningProcessDetailList)

struct process_sample { unsigned pid; uint64_t time_us; unsigned sm, memory, encoder, decoder; };

int nvmlDeviceGetProcessUtilization(struct gpu *gpu, struct process_sample *out, unsigned *count, uint64_t since_us) {
    ENTER(gpu);
    unsigned found = 0, room = *count;
    for (int i = 0; i < PROCESSES; i++) {
        if (!gpu->process_pid[i]) continue;
        if (found < room && out)
            out[found] = (struct process_sample){
                gpu->process_pid[i], since_us + 1000000, (unsigned)gpu->utilization, (unsigned)gpu->memory_utilization, 0, 0,
            };
        found++;
    }
    *count = found;
    return found > room || !out ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- events: Xids only ---- */

enum { EVENT_XID = 0x8 };

struct event_set { struct gpu *gpus[MAX_GPUS]; uint32_t delivered[MAX_GPUS]; int count; };
struct event { struct gpu *gpu; uint64_t type, data; unsigned gpu_instance, compute_instance; };

GET(nvmlDeviceGetSupportedEventTypes, uint64_t, EVENT_XID)

int nvmlEventSetCreate(struct event_set **out) {
    *out = calloc(1, sizeof **out);
    return *out ? ready() : 20;
}

int nvmlEventSetFree(struct event_set *set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(struct gpu *gpu, uint64_t types, struct event_set *set) {
    ENTER(gpu);
    if (types & ~(uint64_t)EVENT_XID || set->count == MAX_GPUS) return INVALID_ARGUMENT;
    set->delivered[set->count] = gpu->xid_count;
    set->gpus[set->count++] = gpu;
    return SUCCESS;
}

static bool next_event(struct event_set *set, struct event *out) {
    for (int i = 0; i < set->count; i++) {
        struct gpu *gpu = set->gpus[i];
        if (set->delivered[i] == gpu->xid_count) continue;
        *out = (struct event){gpu, EVENT_XID, gpu->xid[set->delivered[i]++ % XIDS], 0xffffffff, 0xffffffff};
        return true;
    }
    return false;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event *out, unsigned timeout_ms) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    for (double end = seconds() + timeout_ms / 1e3;;) {
        if (next_event(set, out)) return SUCCESS;
        if (seconds() >= end) return TIMEOUT;
        pause_s(0.005);
    }
}
