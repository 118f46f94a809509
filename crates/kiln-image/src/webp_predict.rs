//! The predictor transform of lossless WebP: each tile has the neighbour, or the mean of neighbours, that suits it.

/// Width and height of a tile, as a power of two.
pub(crate) const TILE_BITS: u32 = 5;
const TILE: usize = 1 << TILE_BITS;
/// Distance of the rows of a tile that are tried with every predictor.
const TRIED_ROWS: usize = 8;
const BYTES_PER_PIXEL: usize = 3;

/// A predictor, by its number in the format.
#[derive(Clone, Copy)]
pub(crate) enum Predictor {
    Left = 1,
    Above = 2,
    Average = 7,
    Select = 11,
    Gradient = 12,
}

/// Images are predicted well by their slopes; flat ones, with text or cartoons, by single neighbours.
const PREDICTORS: [Predictor; 5] =
    [Predictor::Gradient, Predictor::Select, Predictor::Average, Predictor::Above, Predictor::Left];

/// Rows of pixels with what was predicted subtracted, and the predictors of their tiles, from left to right.
pub(crate) struct Predicted {
    pub residuals: Vec<u8>,
    pub predictors: Vec<Predictor>,
}

/// Predicts `rows` of an image, which begin at a tile.
pub(crate) fn predict(pixels: &[u8], stride: usize, rows: std::ops::Range<usize>) -> Predicted {
    let mut residuals = vec![0; stride * rows.len()];
    let mut predictors = Vec::new();
    let mut out = residuals.chunks_exact_mut(stride);
    for top in rows.clone().step_by(TILE) {
        let tile_rows = top..(top + TILE).min(rows.end);
        let chosen: Vec<Predictor> =
            tiles(stride).map(|tile| choose(pixels, stride, tile_rows.clone(), tile)).collect();
        for (y, out) in tile_rows.zip(&mut out) {
            predict_row(pixels, stride, y, &chosen, out);
        }
        predictors.extend(chosen);
    }
    Predicted { residuals, predictors }
}

/// The bytes of a row that belong to each tile. The first pixel of a row has no choice, and belongs to none.
fn tiles(stride: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..stride)
        .step_by(BYTES_PER_PIXEL * TILE)
        .map(move |x| x.max(BYTES_PER_PIXEL)..(x + BYTES_PER_PIXEL * TILE).min(stride))
        .map(|tile| tile.start..tile.end.max(tile.start))
}

/// Returns the predictor with the smallest residuals.
fn choose(
    pixels: &[u8],
    stride: usize,
    rows: std::ops::Range<usize>,
    tile: std::ops::Range<usize>,
) -> Predictor {
    let mut sums = [0u32; PREDICTORS.len()];
    let mut residuals = [0; BYTES_PER_PIXEL * TILE];
    let out = &mut residuals[..tile.len()];
    for y in rows.filter(|&y| y > 0).step_by(TRIED_ROWS) {
        for (sum, predictor) in sums.iter_mut().zip(PREDICTORS) {
            Neighbours::new(pixels, stride, y, &tile).subtract(predictor, out);
            *sum += out.iter().map(|&d| u32::from((d as i8).unsigned_abs())).sum::<u32>();
        }
    }
    let best = (0..sums.len()).min_by_key(|&i| sums[i]).unwrap_or(0);
    PREDICTORS[best]
}

fn predict_row(pixels: &[u8], stride: usize, y: usize, chosen: &[Predictor], out: &mut [u8]) {
    let row = &pixels[y * stride..][..stride];
    if y == 0 {
        // Black, then each pixel by the one before.
        out[..BYTES_PER_PIXEL].copy_from_slice(&row[..BYTES_PER_PIXEL]);
        left(&row[BYTES_PER_PIXEL..], row, &mut out[BYTES_PER_PIXEL..]);
        return;
    }
    let above = &pixels[(y - 1) * stride..][..stride];
    for i in 0..BYTES_PER_PIXEL {
        out[i] = row[i].wrapping_sub(above[i]);
    }
    for (tile, predictor) in tiles(stride).zip(chosen) {
        Neighbours::new(pixels, stride, y, &tile).subtract(*predictor, &mut out[tile]);
    }
}

/// A part of a row with its neighbours.
struct Neighbours<'a> {
    row: &'a [u8],
    left: &'a [u8],
    above: &'a [u8],
    corner: &'a [u8],
}

impl<'a> Neighbours<'a> {
    fn new(pixels: &'a [u8], stride: usize, y: usize, tile: &std::ops::Range<usize>) -> Neighbours<'a> {
        let (at, above) = (y * stride + tile.start, (y - 1) * stride + tile.start);
        Neighbours {
            row: &pixels[at..][..tile.len()],
            left: &pixels[at - BYTES_PER_PIXEL..][..tile.len()],
            above: &pixels[above..][..tile.len()],
            corner: &pixels[above - BYTES_PER_PIXEL..][..tile.len()],
        }
    }

    fn subtract(&self, predictor: Predictor, out: &mut [u8]) {
        match predictor {
            Predictor::Left => left(self.row, self.left, out),
            Predictor::Above => left(self.row, self.above, out),
            Predictor::Average => average(self, out),
            Predictor::Select => select(self, out),
            Predictor::Gradient => gradient(self, out),
        }
    }
}

fn left(row: &[u8], neighbour: &[u8], out: &mut [u8]) {
    for ((out, value), neighbour) in out.iter_mut().zip(row).zip(neighbour) {
        *out = value.wrapping_sub(*neighbour);
    }
}

fn average(n: &Neighbours<'_>, out: &mut [u8]) {
    for ((out, value), (left, above)) in out.iter_mut().zip(n.row).zip(n.left.iter().zip(n.above)) {
        *out = value.wrapping_sub(((u16::from(*left) + u16::from(*above)) / 2) as u8);
    }
}

/// The slope from the corner, continued.
fn gradient(n: &Neighbours<'_>, out: &mut [u8]) {
    let neighbours = n.left.iter().zip(n.above).zip(n.corner);
    for ((out, value), ((left, above), corner)) in out.iter_mut().zip(n.row).zip(neighbours) {
        let slope = i16::from(*left) + i16::from(*above) - i16::from(*corner);
        *out = value.wrapping_sub(slope.clamp(0, 255) as u8);
    }
}

/// The left or the upper pixel as a whole, whichever is nearer to the slope.
fn select(n: &Neighbours<'_>, out: &mut [u8]) {
    let (row, left, above, corner) = (
        n.row.as_chunks::<3>().0,
        n.left.as_chunks::<3>().0,
        n.above.as_chunks::<3>().0,
        n.corner.as_chunks::<3>().0,
    );
    for (i, out) in out.as_chunks_mut::<3>().0.iter_mut().enumerate() {
        let distance = |a: &[u8; 3]| -> u16 { (0..3).map(|c| u16::from(a[c].abs_diff(corner[i][c]))).sum() };
        // The slope's distance from the left pixel is the upper one's from the corner, and the other way round.
        let nearest = if distance(&above[i]) < distance(&left[i]) { left[i] } else { above[i] };
        for c in 0..3 {
            out[c] = row[i][c].wrapping_sub(nearest[c]);
        }
    }
}
