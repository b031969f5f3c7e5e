/*
 * The simulated GPU: its part of the state file, mirrored by layout.py, and its physics.
 *
 * Deterministic in (time, inputs): the die follows ambient + power * resistance / cooling with time constant `tau_s`.
 * Above SW_SLOWDOWN_C the software thermal controller takes power (and clock) away until the temperature holds; above
 * HW_SLOWDOWN_C the hardware halves what is left. Worse cooling therefore throttles, a lower power limit cures it.
 */
#pragma once
#include <math.h>
#include <stdint.h>

enum { MAGIC = 0x4453504f, VERSION = 3, MAX_GPUS = 16, LINKS = 18, PROCESSES = 8, XIDS = 16, INSTANCES = 7 };

/* A MIG instance. Its address is its handle. */
struct mig { char uuid[64], name[64]; uint64_t memory_total, memory_used; uint32_t gpu_instance, compute_instance; };

enum { NO_INSTANCE = 0xffffffff };

enum reason {
    IDLE = 0x1, SW_POWER_CAP = 0x4, HW_SLOWDOWN = 0x8, SYNC_BOOST = 0x10, SW_THERMAL = 0x20, HW_THERMAL = 0x40,
    POWER_BRAKE = 0x80,
};

enum { COUNTER_POWER_CAP, COUNTER_SYNC_BOOST, COUNTER_SW_THERMAL, COUNTER_HW_THERMAL, COUNTER_POWER_BRAKE, COUNTERS };
static const uint32_t COUNTER_REASON[COUNTERS] = {SW_POWER_CAP, SYNC_BOOST, SW_THERMAL, HW_THERMAL, POWER_BRAKE};

static const double SW_SLOWDOWN_C = 87, HW_SLOWDOWN_C = 90, SHUTDOWN_C = 95, MEMORY_MAX_C = 95;
static const double RESISTANCE_C_PER_W = 0.055, IDLE_W = 70, MIN_LIMIT_W = 200, MAX_LIMIT_W = 700;
static const double MAX_SM_MHZ = 1980, IDLE_SM_MHZ = 345, MEMORY_MHZ = 2619;
static const double SM_SHARE = 0.9, WARP_SHARE = 0.25;
static const double THROTTLE_PER_S = 0.2, RECOVER_PER_S = 0.1, MIN_SCALE = 0.2;

/* Running totals: seconds in which a unit was busy (a share of it: that share), traffic. */
struct totals { double engine_s, sm_s, warps_s, tensor_s, dram_s, pcie_sent, pcie_received, link_kib; };

struct gpu {
    /* Written by whoever drives the simulation. */
    char uuid[64], name[64], bus_id[32], serial[32], vbios[32];
    char unsupported[512]; /* names of calls and numbers of fields, each between spaces */
    char denied[256];      /* names of calls that answer NO_PERMISSION, likewise */
    double utilization, memory_utilization, demand_w, cooling, ambient_c, tau_s, link_kib_per_s, hang_until;
    double tensor_share, pcie_bytes_per_s; /* of busy time; in each direction */
    uint64_t memory_total, memory_used, memory_reserved;
    uint64_t ecc[2][2]; /* [volatile, aggregate][corrected, uncorrected] */
    uint64_t link_errors[3][LINKS]; /* [replay, recovery, CRC] */
    uint64_t process_memory[PROCESSES];
    struct mig mig[INSTANCES];
    uint32_t process_pid[PROCESSES], process_instance[PROCESSES]; /* GPU instance, or NO_INSTANCE */
    uint32_t mig_enabled, mig_count;
    uint32_t link_active[LINKS];
    uint32_t remapped[4]; /* correctable, uncorrectable, pending, failure */
    uint32_t pcie_gen, pcie_width, pcie_replays, recovery_action, pcie_errors[2], sram_exceeded, persistence, lost, forced_reasons, counters_work;
    uint32_t profiling, fabric_state, fabric_status, fabric_health;
    uint32_t xid[XIDS], xid_instance[XIDS], xid_count;
    uint32_t fabric_clique;
    unsigned char fabric_cluster[16];
    /* Written by this library. */
    double limit_w, updated, temperature_c, power_w, scale, energy_mj;
    struct totals totals;
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

static uint32_t active_reasons(const struct gpu *gpu) {
    uint32_t reasons = gpu->forced_reasons;
    if (gpu->utilization <= 0) reasons |= IDLE;
    if (gpu->demand_w > gpu->limit_w) reasons |= SW_POWER_CAP;
    if (gpu->scale < 1) reasons |= SW_THERMAL;
    if (gpu->temperature_c >= HW_SLOWDOWN_C) reasons |= HW_THERMAL;
    if (reasons & (HW_THERMAL | POWER_BRAKE)) reasons |= HW_SLOWDOWN;
    return reasons;
}

static void work(struct gpu *gpu, double dt) {
    double busy_s = gpu->utilization / 100 * dt;
    struct totals *totals = &gpu->totals;
    totals->engine_s += busy_s;
    totals->sm_s += busy_s * SM_SHARE;
    totals->warps_s += busy_s * WARP_SHARE;
    totals->tensor_s += busy_s * gpu->tensor_share;
    totals->dram_s += gpu->memory_utilization / 100 * dt;
    totals->pcie_sent += gpu->pcie_bytes_per_s * dt;
    totals->pcie_received += gpu->pcie_bytes_per_s * dt;
    totals->link_kib += gpu->link_kib_per_s * dt;
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
    work(gpu, dt);
    for (int i = 0; i < COUNTERS; i++)
        if (gpu->reasons & COUNTER_REASON[i]) gpu->counter_ns[i] += (uint64_t)(dt * 1e9);
}
