/*
 * Field values: the numbers a driver gives out by field id. What is not listed here answers NOT_SUPPORTED, as an H100
 * does for fans, retired pages and the error counters of single links with ids 32 to 58.
 */
#pragma once
#include "session.h"

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

static int counter(const struct gpu *gpu, uint32_t reason, struct field *field) {
    return gpu->counters_work ? answer(field, TYPE_U64, gpu->counter_ns[reason]) : NOT_SUPPORTED;
}

static int link_field(const struct gpu *gpu, struct field *field) {
    uint32_t id = field->id, link = field->scope;
    bool throughput = id >= 138 && id <= 141;
    if (throughput && link == ALL_LINKS) return answer(field, TYPE_U64, (uint64_t)gpu->totals.link_kib);
    if (link >= LINKS) return INVALID_ARGUMENT;
    if (throughput) return answer(field, TYPE_U64, (uint64_t)(gpu->totals.link_kib / LINKS));
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
    uint32_t first = driver >= 580 ? 269 : 251, last = driver >= 580 ? 307 : driver >= 575 ? 273 : 268;
    if (id > last) return INVALID_ARGUMENT;
    if (driver >= 575 && id >= first && id <= first + 2) return counter(gpu, COUNTER_SW_THERMAL + id - first, field);
    return id <= 273 ? answer(field, TYPE_U32, 1) : NOT_SUPPORTED;
}

static int field_value(const struct gpu *gpu, struct field *field) {
    if (gpu->unsupported[0]) {
        char number[16];
        snprintf(number, sizeof number, "%u", field->id);
        if (listed(gpu->unsupported, number)) return NOT_SUPPORTED;
    }
    switch (field->id) {
    case 1: case 2: return answer(field, TYPE_U32, 1);
    case 3: case 4: case 5: case 6: return answer(field, TYPE_U64, gpu->ecc[(field->id - 3) / 2][(field->id - 3) % 2]);
    case 38: case 45: return answer(field, TYPE_U64, sum(gpu->link_errors[2]));
    case 52: return answer(field, TYPE_U64, sum(gpu->link_errors[0]));
    case 59: return answer(field, TYPE_U64, sum(gpu->link_errors[1]));
    case 74: return counter(gpu, COUNTER_POWER_CAP, field);
    case 75: return counter(gpu, COUNTER_SW_THERMAL, field);
    case 76: return counter(gpu, COUNTER_SYNC_BOOST, field);
    case 82: return answer(field, TYPE_U32, (uint64_t)(gpu->ambient_c + (gpu->temperature_c - gpu->ambient_c) * 1.1));
    case 83: return answer(field, TYPE_U64, (uint64_t)gpu->energy_mj);
    case 91: return answer(field, TYPE_U32, LINKS);
    case 94: return answer(field, TYPE_U32, gpu->pcie_replays);
    case 138: case 139: case 140: case 141: return link_field(gpu, field);
    case 142: case 143: case 144: case 145: return answer(field, TYPE_U32, gpu->remapped[field->id - 142]);
    case 161: case 162: case 163: case 164: case 165: case 166: return link_field(gpu, field);
    case 179: case 180: return answer(field, TYPE_U32, gpu->pcie_errors[field->id - 179]);
    case 185: case 186: return answer(field, TYPE_U32, (uint64_t)(gpu->power_w * 1e3));
    case 187: return answer(field, TYPE_U32, (uint64_t)(MIN_LIMIT_W * 1e3));
    case 188: case 189: return answer(field, TYPE_U32, (uint64_t)(MAX_LIMIT_W * 1e3));
    case 190: case 192: return answer(field, TYPE_U32, (uint64_t)(gpu->limit_w * 1e3));
    case 230: return answer(field, TYPE_U32, gpu->recovery_action);
    default: return field->id >= 251 ? late_field(gpu, field) : NOT_SUPPORTED;
    }
}
