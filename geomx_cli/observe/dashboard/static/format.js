// Numbers as text.

// Seconds as in "1:05" or "2:00:05".
export function clock(seconds) {
  const whole = Math.round(seconds), two = number => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return (hours ? `${hours}:${two(minutes)}` : `${minutes}`) + `:${two(whole % 60)}`;
}

// Bytes as in "1.2 MB".
export function size(bytes, digits = 3) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let value = bytes, unit = 0;
  while (value >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit ? value.toPrecision(digits) : Math.round(value)} ${units[unit]}`;
}

// Marks of an axis, `step` apart, with as many decimals as tell them apart.
export function decimals(ticks) {
  const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : 1;
  let digits = 0;
  while (digits < 12 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-4 * step * 10 ** digits) digits++;
  return ticks.map(tick => Number(tick.toFixed(digits)).toLocaleString("en", { maximumFractionDigits: digits }));
}

// Marks of bytes, with as many digits as tell them apart.
export function sizes(ticks) {
  const texts = digits => ticks.map(tick => size(tick, digits));
  const enough = [3, 4, 5, 6, 7, 8].find(digits => new Set(texts(digits)).size === ticks.length);
  return texts(enough || 9);
}

export const percent = part => part == null ? "" : `${Math.round(100 * part)} %`;

export const whole = number => number == null ? "" : Math.round(number).toLocaleString("en");

// A figure of a chart; null stands for one that is not a number.
export function figure(number, digits) {
  if (number == null) return "";
  return Math.abs(number) >= 10 ** Math.min(3, digits) ? whole(number) : number.toPrecision(digits);
}
