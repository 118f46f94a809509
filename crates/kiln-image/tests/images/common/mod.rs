//! Helpers shared by the tests, with the same patterns as in `make_data.py`.
use std::path::PathBuf;

use kiln_image::{GrayImage, Raster};
use sha2::{Digest, Sha256};

pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Returns the cases of one kind in `golden.txt`, split into fields.
pub fn golden(kind: &str) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(data("golden.txt")).unwrap();
    let lines = text.lines().map(|line| line.split_whitespace().map(String::from).collect::<Vec<_>>());
    let cases: Vec<_> = lines.filter(|fields| fields[0] == kind).map(|fields| fields[1..].to_vec()).collect();
    assert!(!cases.is_empty(), "no golden cases of kind {kind}");
    cases
}

pub fn sha(bytes: &[u8]) -> String {
    kiln_base::hex(Sha256::digest(bytes))
}

/// `pattern` of `make_data.py`: ramps, noise and checks.
pub fn pattern<const C: usize>(width: u32, height: u32) -> Raster<C> {
    let mut pixels = Vec::new();
    for y in 0..height {
        for x in 0..width {
            for c in 0..C as u32 {
                let check = ((x / 5) ^ (y / 3)) & 1;
                pixels.push((x * x * 7 + y * 13 + x * y * 3 + c * 85 + check * 96) as u8);
            }
        }
    }
    Raster::new(width, height, pixels).unwrap()
}

/// `disc` of `make_data.py`: white with a grey rim, on black.
pub fn disc(width: u32, height: u32, cx: i64, cy: i64, radius: i64) -> GrayImage {
    let mut pixels = Vec::new();
    for y in 0..i64::from(height) {
        for x in 0..i64::from(width) {
            let d = (x - cx).pow(2) + (y - cy).pow(2);
            pixels.push(if d <= radius * radius {
                255
            } else if d <= (radius + 1) * (radius + 1) {
                100
            } else {
                0
            });
        }
    }
    GrayImage::new(width, height, pixels).unwrap()
}
