/*
 * GPM, the performance monitor of Hopper and later: what units of the GPU did between two samples of their counters.
 *
 * `struct gpu` holds the running totals, a sample is a copy of them. Metric numbers are those of nvml.h; what is not
 * listed here answers NOT_SUPPORTED.
 */
#pragma once
#include "session.h"

struct gpm_support { unsigned version, supported; };
struct gpm_sample { double time; struct totals totals; };
struct gpm_metric { unsigned id; int result; double value; const char *names[3]; };
struct gpm_request { unsigned version, count; struct gpm_sample *first, *second; struct gpm_metric metrics[]; };

enum { GPM_VERSION = 1 };
/* NVIDIA asks for a tenth of a second between samples, and much less makes no sense. */
static const double MIN_SPAN_S = 0.05, MIB = 1 << 20;

int nvmlGpmQueryDeviceSupport(struct gpu *gpu, struct gpm_support *out) {
    ENTER(gpu);
    if (out->version != GPM_VERSION) return ARGUMENT_VERSION_MISMATCH;
    out->supported = gpu->profiling;
    return SUCCESS;
}

int nvmlGpmSampleAlloc(struct gpm_sample **out) {
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : MEMORY;
}

int nvmlGpmSampleFree(struct gpm_sample *sample) {
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(struct gpu *gpu, struct gpm_sample *sample) {
    ENTER(gpu);
    if (!gpu->profiling) return NOT_SUPPORTED;
    *sample = (struct gpm_sample){gpu->updated, gpu->totals};
    return SUCCESS;
}

/* Busy seconds give percent, bytes give MiB per second. */
static int gpm_metric(const struct gpm_sample *first, const struct gpm_sample *second, struct gpm_metric *metric) {
    double seconds = second->time - first->time;
    const struct totals *before = &first->totals, *after = &second->totals;
    double spent;
    switch (metric->id) {
    case 1: spent = (after->engine_s - before->engine_s) * 100; break;
    case 2: spent = (after->sm_s - before->sm_s) * 100; break;
    case 3: spent = (after->warps_s - before->warps_s) * 100; break;
    case 5: spent = (after->tensor_s - before->tensor_s) * 100; break;
    case 10: spent = (after->dram_s - before->dram_s) * 100; break;
    case 20: spent = (after->pcie_sent - before->pcie_sent) / MIB; break;
    case 21: spent = (after->pcie_received - before->pcie_received) / MIB; break;
    case 60: case 61: spent = (after->link_kib - before->link_kib) * 1024 / MIB; break;
    default: return NOT_SUPPORTED;
    }
    metric->value = seconds < MIN_SPAN_S ? NAN : spent / seconds;
    return SUCCESS;
}

int nvmlGpmMetricsGet(struct gpm_request *request) {
    if (ready() != SUCCESS) return UNINITIALIZED;
    if (request->version != GPM_VERSION) return ARGUMENT_VERSION_MISMATCH;
    if (!request->first || !request->second) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < request->count; i++)
        request->metrics[i].result = gpm_metric(request->first, request->second, &request->metrics[i]);
    return SUCCESS;
}
