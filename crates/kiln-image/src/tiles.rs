//! Tiles of a large image: where they lie, and how a finished one is blended into the image.
//!
//! Tiles are finished row by row from the top left, each over the ones before it. Across an overlap the new tile fades in
//! over the middle half: the outer quarter, where a convolution sees the tile's border, keeps what was there.

use crate::{Filter, RgbImage, resize};

/// Side of the areas whose mean colours [`match_tones`] compares.
const TONE_BLOCK: u32 = 64;

/// Returns the evenly spread starts of tiles along an axis of `size`, which overlap by at least `overlap`. The unit is the
/// caller's.
pub fn tile_starts(size: usize, tile: usize, overlap: usize) -> Vec<usize> {
    if size <= tile {
        return vec![0];
    }
    let count = (size - overlap).div_ceil(tile - overlap);
    (0..count).map(|i| i * (size - tile) / (count - 1)).collect()
}

/// The tiles of an image. All have the same size; sides and positions are multiples of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileGrid {
    width: u32,
    height: u32,
    columns: Vec<u32>,
    rows: Vec<u32>,
}

/// A tile: its rectangle, and how far it overlaps the finished tiles on its left and above it. In pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Left edge.
    pub left: u32,
    /// Upper edge.
    pub top: u32,
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
    /// Columns that it shares with the tile on its left; 0 in the first column.
    pub overlap_left: u32,
    /// Rows that it shares with the tile above; 0 in the first row.
    pub overlap_top: u32,
}

impl TileGrid {
    /// Divides an image into tiles of at most `side` pixels a side that overlap by at least `overlap`; all in multiples of
    /// `unit`, which must divide the image's sides. Tiles are no larger than their number requires.
    pub fn new([width, height]: [u32; 2], side: u32, overlap: u32, unit: u32) -> TileGrid {
        let axis = |size: u32| {
            let [size, side, overlap] = [size, side, overlap].map(|v| (v / unit).max(1) as usize);
            let overlap = overlap.min(side - 1);
            let tile = if size <= side {
                size
            } else {
                let count = (size - overlap).div_ceil(side - overlap);
                (size + (count - 1) * overlap).div_ceil(count)
            };
            let starts = tile_starts(size, tile, overlap);
            (tile as u32 * unit, starts.into_iter().map(|start| start as u32 * unit).collect::<Vec<_>>())
        };
        let ((width, columns), (height, rows)) = (axis(width), axis(height));
        TileGrid { width, height, columns, rows }
    }

    /// Width of every tile.
    pub fn tile_width(&self) -> u32 {
        self.width
    }

    /// Height of every tile.
    pub fn tile_height(&self) -> u32 {
        self.height
    }

    /// Number of tiles.
    pub fn count(&self) -> usize {
        self.columns.len() * self.rows.len()
    }

    /// Iterates over the tiles, row by row.
    pub fn tiles(&self) -> impl Iterator<Item = Tile> + '_ {
        let overlap = |starts: &[u32], i: usize, size: u32| match i {
            0 => 0,
            _ => starts[i - 1] + size - starts[i],
        };
        (0..self.count()).map(move |i| {
            let (row, column) = (i / self.columns.len(), i % self.columns.len());
            Tile {
                left: self.columns[column],
                top: self.rows[row],
                width: self.width,
                height: self.height,
                overlap_left: overlap(&self.columns, column, self.width),
                overlap_top: overlap(&self.rows, row, self.height),
            }
        })
    }
}

impl Tile {
    /// Crops the tile out of the whole image.
    pub fn crop(&self, image: &RgbImage) -> RgbImage {
        image.crop(i64::from(self.left), i64::from(self.top), self.width, self.height)
    }

    /// Whether a position inside the tile lies in the outer half of an overlap, which belongs to a finished tile.
    pub fn is_taken(&self, x: u32, y: u32) -> bool {
        x < self.overlap_left / 2 || y < self.overlap_top / 2
    }

    /// Blends the finished tile into the image.
    pub fn blend(&self, image: &mut RgbImage, tile: &RgbImage) {
        let left = self.left as usize * 3;
        for y in 0..self.height {
            let vertical = fade(y, self.overlap_top);
            let row = &mut image.row_mut(self.top + y)[left..];
            for (x, (old, new)) in row.chunks_exact_mut(3).zip(tile.row(y).chunks_exact(3)).enumerate() {
                let weight = vertical * fade(x as u32, self.overlap_left);
                for (old, new) in old.iter_mut().zip(new) {
                    *old = mix(*old, *new, weight);
                }
            }
        }
    }
}

/// The weight of a new tile at this distance from its edge: 0 over the outer quarter of the overlap, 1 from the inner
/// quarter on, linear between them.
fn fade(at: u32, overlap: u32) -> f32 {
    if overlap == 0 {
        return 1.0;
    }
    let position = (at as f32 + 0.5) / overlap as f32;
    ((position - 0.25) * 2.0).clamp(0.0, 1.0)
}

fn mix(old: u8, new: u8, weight: f32) -> u8 {
    let (old, new) = (f32::from(old), f32::from(new));
    (old + (new - old) * weight).round() as u8
}

/// Enlarges an image by `scale`, and repeats its last row and column until both sides are multiples of `unit`.
pub fn enlarge(image: &RgbImage, scale: u32, unit: u32) -> RgbImage {
    let (width, height) = (image.width() * scale, image.height() * scale);
    let large = resize(image, width, height, Filter::Bicubic);
    let [padded_width, padded_height] = [width, height].map(|side| side.next_multiple_of(unit));
    if (padded_width, padded_height) == (width, height) {
        return large;
    }
    let mut padded = RgbImage::black(padded_width, padded_height);
    for y in 0..padded_height {
        let (source, row) = (large.row(y.min(height - 1)), padded.row_mut(y));
        let (inside, outside) = row.split_at_mut(source.len());
        inside.copy_from_slice(source);
        outside.chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&source[source.len() - 3..]));
    }
    padded
}

/// Shrinks an image to at most `area` pixels, with sides that are multiples of `unit`.
pub fn overview(image: &RgbImage, area: u64, unit: u32) -> RgbImage {
    let scale = (area as f64 / image.area() as f64).sqrt().min(1.0);
    let side = |side: u32| ((f64::from(side) * scale) as u32 / unit * unit).max(unit);
    resize(image, side(image.width()), side(image.height()), Filter::Lanczos)
}

/// Gives an image the tones of `source`, which has the same size: moves the mean colours of its areas, interpolated between
/// their centres, and leaves the detail inside them.
pub fn match_tones(image: &RgbImage, source: &RgbImage) -> RgbImage {
    let (columns, rows) =
        (image.width().div_ceil(TONE_BLOCK).max(1), image.height().div_ceil(TONE_BLOCK).max(1));
    let (have, want) = (block_means(image, columns, rows), block_means(source, columns, rows));
    let shifts: Vec<[f32; 3]> =
        have.iter().zip(&want).map(|(have, want)| std::array::from_fn(|c| want[c] - have[c])).collect();
    let mut matched = image.clone();
    for y in 0..image.height() {
        let (above, below, down) = neighbours(y, image.height(), rows);
        for (x, pixel) in matched.row_mut(y).chunks_exact_mut(3).enumerate() {
            let (left, right, across) = neighbours(x as u32, image.width(), columns);
            let shift = |row: u32, column: u32| &shifts[(row * columns + column) as usize];
            for (c, value) in pixel.iter_mut().enumerate() {
                let between = |row: u32| {
                    let (a, b) = (shift(row, left)[c], shift(row, right)[c]);
                    a + (b - a) * across
                };
                let (a, b) = (between(above), between(below));
                *value = (f32::from(*value) + a + (b - a) * down).round().clamp(0.0, 255.0) as u8;
            }
        }
    }
    matched
}

/// Returns the mean colour of each of `columns` × `rows` areas.
fn block_means(image: &RgbImage, columns: u32, rows: u32) -> Vec<[f32; 3]> {
    let mut sums = vec![[0u64; 4]; (columns * rows) as usize];
    for y in 0..image.height() {
        let row = y * rows / image.height();
        for (x, pixel) in image.row(y).chunks_exact(3).enumerate() {
            let sum = &mut sums[(row * columns + x as u32 * columns / image.width()) as usize];
            (0..3).for_each(|c| sum[c] += u64::from(pixel[c]));
            sum[3] += 1;
        }
    }
    sums.iter().map(|sum| std::array::from_fn(|c| sum[c] as f32 / sum[3].max(1) as f32)).collect()
}

/// Returns the two of `count` areas whose centres lie around a position, and how far it is from the first to the second.
fn neighbours(at: u32, size: u32, count: u32) -> (u32, u32, f32) {
    let position = ((at as f32 + 0.5) * count as f32 / size as f32 - 0.5).clamp(0.0, (count - 1) as f32);
    let first = position as u32;
    (first, (first + 1).min(count - 1), position - first as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(width: u32, height: u32, pixel: impl Fn(u32, u32) -> u8) -> RgbImage {
        let pixels = (0..width * height).flat_map(|i| [pixel(i % width, i / width); 3]).collect();
        RgbImage::new(width, height, pixels).unwrap()
    }

    #[test]
    fn tiles_cover_the_image_and_overlap() {
        for (width, height) in [(512, 512), (2048, 1024), (80, 4096), (4096, 4096), (272, 304)] {
            for side in [64, 256, 1024] {
                let grid = TileGrid::new([width, height], side, side / 4, 16);
                let tiles: Vec<Tile> = grid.tiles().collect();
                let last = tiles[tiles.len() - 1];
                assert_eq!((last.left + last.width, last.top + last.height), (width, height));
                assert!(grid.tile_width() <= side && grid.tile_height() <= side);
                for tile in &tiles {
                    let sides = [tile.left, tile.top, tile.width, tile.height];
                    assert!(sides.iter().all(|v| v % 16 == 0), "{tile:?}");
                    assert!(tile.left == 0 || tile.overlap_left >= side / 4, "{tile:?}");
                    assert!(tile.top == 0 || tile.overlap_top >= side / 4, "{tile:?}");
                }
            }
        }
    }

    #[test]
    fn tiles_of_the_image_itself_give_the_image() {
        let original = image(208, 144, |x, y| (x * 3 + y * 7) as u8);
        let mut canvas = original.clone();
        let grid = TileGrid::new([208, 144], 96, 32, 16);
        assert!(grid.count() > 4);
        grid.tiles().for_each(|tile| tile.blend(&mut canvas, &tile.crop(&original)));
        assert_eq!(canvas, original);
    }

    #[test]
    fn a_tile_fades_in_across_its_overlap() {
        let mut canvas = image(112, 16, |_, _| 0);
        let grid = TileGrid::new([112, 16], 64, 16, 16);
        let second = grid.tiles().nth(1).unwrap();
        second.blend(&mut canvas, &image(second.width, 16, |_, _| 200));
        let row: Vec<u8> = canvas.row(3).chunks_exact(3).map(|pixel| pixel[0]).collect();
        let overlap = &row[second.left as usize..][..second.overlap_left as usize];
        assert!(overlap.windows(2).all(|pair| pair[0] <= pair[1]), "{overlap:?}");
        let quarter = overlap.len() / 4;
        assert!(
            overlap[..quarter].iter().all(|v| *v == 0)
                && overlap[3 * quarter + 1..].iter().all(|v| *v == 200)
        );
        assert!(second.is_taken(0, 0) && !second.is_taken(second.overlap_left / 2, 0));
    }

    #[test]
    fn an_enlarged_image_is_padded_with_its_edge() {
        let large = enlarge(&image(10, 9, |x, _| x as u8 * 20), 2, 16);
        assert_eq!((large.width(), large.height()), (32, 32));
        assert_eq!(large.row(3)[19 * 3..20 * 3], large.row(31)[31 * 3..]);
    }

    #[test]
    fn tones_follow_the_source_and_detail_stays() {
        let source = image(192, 128, |x, _| 40 + (x / 2) as u8);
        let darker = image(192, 128, |x, y| 10 + (x / 2) as u8 + ((x + y) % 2) as u8 * 20);
        let matched = match_tones(&darker, &source);
        let mean = |image: &RgbImage| {
            image.pixels().iter().map(|v| f64::from(*v)).sum::<f64>() / image.pixels().len() as f64
        };
        assert!((mean(&matched) - mean(&source)).abs() < 0.5);
        let step = |image: &RgbImage| i32::from(image.row(64)[96 * 3]) - i32::from(image.row(64)[97 * 3]);
        assert_eq!(step(&matched), step(&darker));
    }

    #[test]
    fn an_overview_has_the_area_and_shape_of_the_image() {
        let small = overview(&image(400, 200, |x, _| x as u8), 128 * 64, 16);
        assert_eq!((small.width(), small.height()), (128, 64));
        let same = overview(&image(40, 20, |x, _| x as u8), 1 << 20, 16);
        assert_eq!((same.width(), same.height()), (32, 16));
    }
}
