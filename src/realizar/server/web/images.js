// Images of a message. They are reduced to what the model reads, and made anew: nothing else of a file is kept or sent.

import { tellDrawn } from "./slices.js";

const MAX_BYTES = 32 << 20; // of a file
const MAX_PIXELS = 4 << 20; // also where a model would read more, or of any number
const MAX_PNG = 512 << 10; // bytes; what takes more becomes JPEG
const QUALITY = 0.9;
const MADE_HERE = /^data:image\/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}$/;

/** True for a file with pixels; SVG is text. */
export const isImageFile = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";

/** True for a stored image, `{name, url}`, that this page made. */
export const isImage = (value) => typeof value?.url === "string" && MADE_HERE.test(value.url);

/** Width and height of an image once it has `edge` pixels on its longer edge and `pixels` in all, at most; null is any. */
function reduced(width, height, { edge, pixels }) {
  const most = Math.min(pixels ?? Infinity, MAX_PIXELS);
  const share = Math.min(1, (edge ?? Infinity) / Math.max(width, height), Math.sqrt(most / (width * height)));
  return [width, height].map((length) => Math.max(1, Math.round(length * share)));
}

const encoded = (canvas, type) => new Promise((resolve) => { canvas.toBlob(resolve, type, QUALITY); });

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** An image file as `{name, url}`, upright and over white, no larger than `largest`, the model's `{edge, pixels}`. */
export async function readImage(file, largest) {
  if (file.size > MAX_BYTES) {
    throw new Error(`“${file.name}” is larger than ${MAX_BYTES >> 20} MiB, the most that is read of an image.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`“${file.name}” is no image that this browser reads.`);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = reduced(bitmap.width, bitmap.height, largest);
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const png = await encoded(canvas, "image/png");
  const blob = png?.size <= MAX_PNG ? png : await encoded(canvas, "image/jpeg");
  if (!blob) {
    throw new Error(`“${file.name}” is too large for this browser.`);
  }
  return { name: file.name, url: await dataUrl(blob) };
}

export function imageNode({ name, url }) {
  const node = document.createElement("img");
  Object.assign(node, { className: "picture", alt: name, src: url });
  node.addEventListener("load", tellDrawn); // it takes its room only then
  return node;
}
