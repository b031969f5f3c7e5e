// One board of Grafana, drawn by Grafana's own libraries: field configuration, units, thresholds, transformations and
// links by @grafana/data, lines, numbers, tables and frames by @grafana/ui. Heat maps and timelines of states are not
// in these packages and are drawn here in the simplest form. The data are in the page: see boards.py.
import { css, Global } from '@emotion/react';
import {
  applyFieldOverrides, createTheme, DataFrame, dateTime, displayNameOverrideProcessor, Field, FieldConfigOptionsRegistry,
  FieldType, getDisplayProcessor, getFieldDisplayName, getFieldDisplayValues, GrafanaTheme2, identityOverrideProcessor,
  standardTransformers, standardTransformersRegistry, ThemeContext, TimeRange, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { flushSync } from 'react-dom';
import { firstValueFrom } from 'rxjs';

type Series = { metric: Record<string, string>; values?: Array<[number, string]>; value?: [number, string] };
type Input = {
  board: any; theme: 'light' | 'dark'; from: number; to: number; step: number; width: number;
  answers: Record<string, Series[]>; variables: Record<string, string>;
};
declare global { interface Window { INPUT: Input } }

const input = window.INPUT;
const theme: GrafanaTheme2 = createTheme({ colors: { mode: input.theme } });
const timeRange: TimeRange = {
  from: dateTime(input.from * 1000), to: dateTime(input.to * 1000),
  raw: { from: dateTime(input.from * 1000), to: dateTime(input.to * 1000) },
};
const shown: Record<string, unknown> = {};
const UNIT = 38, GAP = 8;

standardTransformersRegistry.setInit(() => [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer]
  .map((transformation) => ({ id: transformation.id, name: transformation.name, transformation: async () => transformation, editor: () => null }) as any));

const CUSTOM: Record<string, Record<string, unknown>> = {
  timeseries: {
    drawStyle: 'line', lineInterpolation: 'linear', barAlignment: 0, lineWidth: 1, fillOpacity: 0, gradientMode: 'none',
    spanNulls: false, showPoints: 'auto', pointSize: 5, axisPlacement: 'auto', axisLabel: '', axisColorMode: 'text',
    axisBorderShow: false, axisCenteredZero: false, scaleDistribution: { type: 'linear' }, insertNulls: false,
    hideFrom: { tooltip: false, viz: false, legend: false }, stacking: { group: 'A', mode: 'none' },
    thresholdsStyle: { mode: 'off' },
  },
  table: { align: 'auto', cellOptions: { type: 'auto' }, inspect: false },
};

function registry() {
  const standard = ['unit', 'min', 'max', 'decimals', 'displayName', 'mappings', 'thresholds', 'color', 'links', 'noValue'];
  const custom = [...new Set([...Object.keys(CUSTOM.timeseries), ...Object.keys(CUSTOM.table), 'axisSoftMin', 'axisSoftMax', 'width'])];
  const item = (id: string, isCustom: boolean) => ({
    id: isCustom ? `custom.${id}` : id, path: id, name: id, isCustom, shouldApply: () => true, settings: {},
    process: id === 'displayName' ? displayNameOverrideProcessor : identityOverrideProcessor,
    getItemsCount: (value: any) => value?.length ?? 0, editor: () => null, override: () => null, description: '',
  });
  return new FieldConfigOptionsRegistry(() => [
    ...standard.map((id) => item(id, false)), ...custom.map((id) => item(id, true)),
  ] as any);
}
const REGISTRY = registry();

// ${name} and ${name:format}; fields of a row (${__data.fields.x}) are filled by the cell's links.
function replace(text: string, scoped?: any): string {
  const filled = text.replace(/\$\{(\w+)(?::(\w+))?\}/g, (whole, name, format) => {
    const value = input.variables[name] ?? whole;
    return format === 'queryparam' ? `var-${name}=${value}` : value;
  });
  const row = scoped?.__dataContext?.value;
  return filled.replace(/\$\{__data\.fields\.(\w+)\}/g, (whole, name) => {
    const field = row?.frame?.fields.find((each: Field) => each.name === name);
    return field && row.rowIndex !== undefined ? String(field.values[row.rowIndex]) : whole;
  });
}

function legend(format: string | undefined, metric: Record<string, string>): string | undefined {
  if (format) {
    return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => metric[label] ?? '');
  }
  const { __name__, ...labels } = metric;
  const said = Object.entries(labels).map(([label, value]) => `${label}="${value}"`).join(', ');
  return __name__ || said ? `${__name__ ?? ''}{${said}}` : undefined;
}

function lines(target: any): DataFrame[] {
  const points = Math.round((input.to - input.from) / input.step) + 1;
  const times = Array.from({ length: points }, (_, n) => (input.from + n * input.step) * 1000);
  return (input.answers[target.expr] ?? []).map((series) => {
    const known = new Map(series.values!.map(([at, value]) => [Math.round(at * 1000), Number(value)]));
    const name = legend(target.legendFormat, series.metric);
    return toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: times, config: { interval: input.step * 1000 } },
        {
          name: 'Value', type: FieldType.number, labels: series.metric, config: name ? { displayNameFromDS: name } : {},
          values: times.map((at) => known.get(Math.round(at)) ?? null),
        },
      ],
    });
  });
}

function rows(target: any, several: boolean): DataFrame[] {
  const found = input.answers[target.expr] ?? [];
  const labels = [...new Set(found.flatMap((series) => Object.keys(series.metric)))].sort();
  return found.length === 0 ? [] : [toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: found.map((series) => series.value![0] * 1000) },
      ...labels.map((name) => ({ name, type: FieldType.string, values: found.map((series) => series.metric[name] ?? '') })),
      {
        name: several ? `Value #${target.refId}` : 'Value', type: FieldType.number,
        values: found.map((series) => Number(series.value![1])),
      },
    ],
  })];
}

async function frames(panel: any): Promise<DataFrame[]> {
  const table = panel.type === 'table';
  const raw = panel.targets.flatMap((target: any) => (table ? rows(target, panel.targets.length > 1) : lines(target)));
  const configs = panel.transformations ?? [];
  const transformed = configs.length ? await firstValueFrom(transformDataFrame(configs, raw)) : raw;
  const byPalette = panel.type === 'timeseries';
  const defaults = panel.fieldConfig.defaults;
  const fieldConfig = {
    defaults: {
      thresholds: { mode: 'absolute', steps: [{ color: 'green', value: -Infinity }, { color: 'red', value: 80 }] },
      ...defaults,
      color: defaults.color ?? { mode: byPalette ? 'palette-classic' : 'thresholds' },
      custom: { ...CUSTOM[panel.type], ...defaults.custom },
    },
    overrides: panel.fieldConfig.overrides,
  };
  for (const step of fieldConfig.defaults.thresholds.steps) {
    step.value = step.value ?? -Infinity;
  }
  return applyFieldOverrides({
    data: transformed, fieldConfig, fieldConfigRegistry: REGISTRY, replaceVariables: replace, theme, timeZone: 'utc',
  } as any);
}

const Nothing = ({ text }: { text: string }) => (
  <div style={{ display: 'grid', placeItems: 'center', height: '100%', color: theme.colors.text.secondary }}>{text}</div>
);

function Numbers({ panel, data, width, height }: any) {
  const values = getFieldDisplayValues({
    data, fieldConfig: panel.fieldConfig, reduceOptions: { values: false, ...panel.options.reduceOptions },
    replaceVariables: replace, sparkline: panel.options.graphMode !== 'none', theme, timeZone: 'utc',
  } as any);
  shown[panel.title] = { ...(shown[panel.title] as object), texts: values.map(({ display }) => `${display.prefix ?? ''}${display.text}${display.suffix ?? ''}`) };
  return <div style={{ display: 'flex' }}>{values.map((each, n) => (
    <BigValue key={n} theme={theme} width={width / values.length} height={height} value={each.display} sparkline={each.sparkline}
      colorMode={panel.options.colorMode} graphMode={panel.options.graphMode} count={values.length} textMode={panel.options.textMode} />
  ))}</div>;
}

function ticks(height: number, width: number, left: number) {
  const count = Math.max(2, Math.min(8, Math.floor(width / 100)));
  return Array.from({ length: count }, (_, n) => {
    const at = (n + 0.5) / count;
    const text = new Date((input.from + at * (input.to - input.from)) * 1000).toISOString().slice(11, 16);
    return <text key={n} x={left + at * (width - left)} y={height - 2} textAnchor="middle" fontSize={12} fill={theme.colors.text.primary}>{text}</text>;
  });
}

function States({ data, width, height }: any) {
  const left = 160, bottom = 18, tall = (height - bottom) / data.length, wide = (width - left) / data[0].fields[0].values.length;
  return <svg width={width} height={height}>{data.map((frame: DataFrame, n: number) => {
    const field = frame.fields[1], display = field.display ?? getDisplayProcessor({ field, theme });
    return <g key={n}>
      <text x={left - 8} y={(n + 0.5) * tall + 4} textAnchor="end" fontSize={12} fill={theme.colors.text.primary}>{getFieldDisplayName(field, frame, data)}</text>
      {Array.from(field.values, (value, at) => value === null ? null : <rect key={at} x={left + at * wide} y={(n + 0.1) * tall} width={wide + 0.5} height={tall * 0.8} fill={display(value).color} />)}
    </g>;
  })}{ticks(height, width, left)}</svg>;
}

function HeatMap({ data, width, height }: any) {
  const fields: Field[] = data.map((frame: DataFrame) => frame.fields[1]);
  const values = fields.flatMap((field) => Array.from(field.values)).filter((value) => value !== null) as number[];
  const low = Math.min(...values), high = Math.max(...values), buckets = 12, columns = 60;
  const size = (high - low) / buckets || 1, left = 60, bottom = 18;
  const counts = new Map<string, number>();
  fields.forEach((field) => Array.from(field.values).forEach((value, at) => {
    if (value !== null) {
      const cell = `${Math.floor((at / field.values.length) * columns)},${Math.min(buckets - 1, Math.floor(((value as number) - low) / size))}`;
      counts.set(cell, (counts.get(cell) ?? 0) + 1);
    }
  }));
  const most = Math.max(...counts.values()), wide = (width - left) / columns, tall = (height - bottom) / buckets;
  const display = getDisplayProcessor({ field: fields[0], theme });
  const said = (value: number) => { const { text, prefix, suffix } = display(value); return `${prefix ?? ''}${text}${suffix ?? ''}`; };
  return <svg width={width} height={height}>
    {[...counts].map(([cell, count]) => {
      const [x, y] = cell.split(',').map(Number);
      return <rect key={cell} x={left + x * wide} y={(buckets - 1 - y) * tall} width={wide - 1} height={tall - 1} fill="#e0752d" opacity={0.15 + 0.85 * Math.sqrt(count / most)} />;
    })}
    {[0, 0.25, 0.5, 0.75, 1].map((at) => <text key={at} x={left - 8} y={Math.max(10, (1 - at) * (height - bottom))} textAnchor="end" fontSize={12} fill={theme.colors.text.primary}>{said(low + at * (high - low))}</text>)}
    {ticks(height, width, left)}
  </svg>;
}

function Lines({ panel, data, width, height }: any) {
  return <TimeSeries frames={data} width={width} height={height} timeRange={timeRange} timeZone="utc" legend={panel.options.legend} options={panel.options} />;
}

function Listing({ panel, data, width, height }: any) {
  const [frame] = data as DataFrame[];
  const texts = Array.from({ length: frame.length }, (_, row) => Object.fromEntries(frame.fields.map((field) => {
    const { text, prefix, suffix } = (field.display ?? getDisplayProcessor({ field, theme }))(field.values[row]);
    return [getFieldDisplayName(field, frame, data), `${prefix ?? ''}${text}${suffix ?? ''}`];
  })));
  const links = frame.fields.flatMap((field) => field.getLinks?.({ valueRowIndex: 0 }).map((link) => link.href) ?? []);
  shown[panel.title] = { ...(shown[panel.title] as object), texts, links };
  return <TableNG data={frame} width={width} height={height} enableVirtualization={false} fieldConfig={panel.fieldConfig} />;
}

const KINDS: Record<string, React.FC<any>> = { stat: Numbers, timeseries: Lines, 'state-timeline': States, heatmap: HeatMap, table: Listing };

class Guard extends React.Component<{ title: string; children: React.ReactNode }, { error: string }> {
  state = { error: '' };
  static getDerivedStateFromError(error: Error) { return { error: String(error.stack ?? error) }; }
  componentDidCatch(error: Error) { shown[this.props.title] = { ...(shown[this.props.title] as object), error: String(error) }; }
  render() { return this.state.error ? <pre>{this.state.error}</pre> : this.props.children; }
}

async function place(panel: any, top: number): Promise<[React.ReactNode, number]> {
  const column = (input.width + GAP) / 24, { x, y, w, h } = panel.gridPos;
  const box = { position: 'absolute', left: x * column, top: y * UNIT - top, width: w * column - GAP, height: h * UNIT - GAP } as const;
  const bottom = box.top + box.height;
  if (panel.type === 'row') {
    return [<div key={`row ${panel.title}`} style={{ ...box, ...theme.typography.h6 as object, paddingTop: 6 }}>⌄ {panel.title}</div>, bottom];
  }
  const data = await frames(panel), Kind = KINDS[panel.type];
  const numbers = data.flatMap((frame) => frame.fields.filter((field) => field.type === FieldType.number).map((field) => [frame, field] as const));
  const empty = numbers.every(([, field]) => Array.from(field.values).every((value) => value === null || value === undefined));
  shown[panel.title] = {
    type: panel.type, series: data.length, empty, box: [box.left, box.top, box.width, box.height],
    names: numbers.map(([frame, field]) => getFieldDisplayName(field, frame, data)),
  };
  const node = <div key={panel.title} style={box}>
    <PanelChrome title={replace(panel.title)} description={panel.description} width={box.width} height={box.height}>
      {(width, height) => <Guard title={panel.title}>{empty && panel.type !== 'stat' ? <Nothing text={panel.fieldConfig.defaults.noValue ?? 'No data'} /> : <Kind {...{ panel, data, width, height }} />}</Guard>}
    </PanelChrome>
  </div>;
  return [node, bottom];
}

async function main() {
  // Collapsed rows are opened: each panel is to be looked at.
  const panels = input.board.panels.flatMap((panel: any) => [panel, ...(panel.panels ?? [])]);
  let bottom = 0;
  const nodes = [];
  for (const panel of panels) {
    const [node, end] = await place(panel, 0);
    nodes.push(node);
    bottom = Math.max(bottom, end);
  }
  const root = document.getElementById('root')!;
  root.style.height = `${bottom + 2 * GAP}px`;
  flushSync(() => createRoot(root).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Global styles={css`body { background: ${theme.colors.background.canvas}; margin: 0; overflow: hidden }`} />
      <h1 style={{ position: 'absolute', left: -9999 }}>{input.board.title}</h1>
      <div style={{ position: 'absolute', left: GAP, top: GAP }}>{nodes}</div>
    </ThemeContext.Provider>,
  ));
  await new Promise((done) => setTimeout(done, 500));
  document.title = JSON.stringify({ height: bottom + 2 * GAP, panels: shown });
}

main().catch((error) => { document.title = JSON.stringify({ error: String(error.stack ?? error) }); });
