/*
 * A simulated libnvidia-ml.so.1: the calls of NVML that opsd and nvitop-exporter make, answered from a shared file.
 *
 * The file named by OPSD_SIMULATED_NVML holds one `struct state` (gpu.h). This library runs in any number of processes
 * at once, which see each change of the file immediately; what a call sets (the power limit) stays set.
 *
 * Struct layouts, return codes and field numbers are those of NVIDIA's public nvml.h (drivers 570, 575, 580).
 */
#define _GNU_SOURCE
#include "fields.h"
#include "gpm.h"
#include "gpu.h"
#include "session.h"

#include <stddef.h>

/* What tells opsd that the GPUs are simulated; also the size of the layout, for the test of its mirror. */
uint64_t opsd_simulated_nvml(void) { return sizeof(struct state); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int result = sessions ? SUCCESS : map_state();
    if (result == SUCCESS) result = (int)shared->init_error;
    if (result != SUCCESS) return result;
    seen_reloads = shared->reloads;
    sessions++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!sessions) return UNINITIALIZED;
    sessions--;
    return SUCCESS;
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
    if (ready() != SUCCESS) return UNINITIALIZED;
    *out = shared->driver >= 580 ? 13000 : shared->driver >= 575 ? 12090 : 12080;
    return SUCCESS;
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

TEXT_OF(nvmlDeviceGetName, gpu->name, mig->name)
TEXT_OF(nvmlDeviceGetUUID, gpu->uuid, mig->uuid)
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
ABSENT(nvmlDeviceGetRetiredPages)

/* ---- MIG ---- */

GET(nvmlDeviceGetMaxMigDeviceCount, unsigned, INSTANCES)

int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu);
    *current = *pending = gpu->mig_enabled;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct mig **out) {
    ENTER(gpu);
    if (index >= gpu->mig_count) return NOT_FOUND;
    *out = &gpu->mig[index];
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *out) {
    *out = instance_at(handle, &(struct gpu *){NULL}) != NULL;
    return ready();
}

int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *out) {
    ENTER_ANY(handle);
    if (!mig) return NOT_SUPPORTED;
    *out = mig->gpu_instance;
    return SUCCESS;
}

int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *out) {
    ENTER_ANY(handle);
    if (!mig) return NOT_SUPPORTED;
    *out = mig->compute_instance;
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

/* The real driver does not tell of a GPU with MIG, nor of its instances. */
int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out) {
    ENTER_ANY(handle);
    if (mig || gpu->mig_enabled) return NOT_SUPPORTED;
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

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    ENTER_ANY(handle);
    if (mig) {
        *out = (struct memory_v2){out->version, mig->memory_total, 0, mig->memory_total - mig->memory_used, mig->memory_used};
        return SUCCESS;
    }
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

/* Version 2; version 3 has an eight-bit summary of the health mask at its end. */
struct fabric {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, health;
};

int nvmlDeviceGetGpuFabricInfoV(struct gpu *gpu, struct fabric *out) {
    ENTER(gpu);
    if (out->version != (2u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    *out = (struct fabric){
        .version = out->version, .status = gpu->fabric_status, .state = gpu->fabric_state, .health = gpu->fabric_health,
        .clique = gpu->fabric_clique,
    };
    memcpy(out->cluster, gpu->fabric_cluster, sizeof out->cluster);
    return SUCCESS;
}

struct sram { uint32_t version; uint64_t counts[11]; uint32_t exceeded; };

int nvmlDeviceGetSramEccErrorStatus(struct gpu *gpu, struct sram *out) {
    ENTER(gpu);
    if (out->version != (1u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    *out = (struct sram){.version = out->version, .exceeded = gpu->sram_exceeded};
    return SUCCESS;
}

/* ---- field values ---- */

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
            out[found] = (struct process){
                gpu->process_pid[i], gpu->process_memory[i], gpu->process_instance[i],
                gpu->process_instance[i] == NO_INSTANCE ? NO_INSTANCE : 0,
            };
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
    return *out ? ready() : MEMORY;
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
        unsigned slot = set->delivered[i]++ % XIDS, instance = gpu->xid_instance[slot];
        *out = (struct event){gpu, EVENT_XID, gpu->xid[slot], instance, instance == NO_INSTANCE ? NO_INSTANCE : 0};
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
