//! Values of `--size` and `--aspect`: the size of the image in the words of other programs.

/// The longest side in terms of the shortest.
const MAX_RATIO: f64 = 16.0;

/// Width divided by height.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aspect(f64);

/// Parses `WxH`, in pixels.
pub fn parse_size(text: &str) -> Result<(u32, u32), String> {
    let sides = text.split_once(['x', 'X', '×']);
    let parse = |side: &str| side.trim().parse::<u32>().ok().filter(|side| *side >= 16);
    sides
        .and_then(|(width, height)| Some((parse(width)?, parse(height)?)))
        .ok_or_else(|| "expected width and height of at least 16 pixels, such as 768x512".into())
}

impl Aspect {
    /// Parses `W:H`.
    pub fn parse(text: &str) -> Result<Aspect, String> {
        let number = |side: &str| side.trim().parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0);
        let sides = text.split_once([':', '/', 'x']);
        let ratio = sides.and_then(|(width, height)| Some(number(width)? / number(height)?));
        ratio
            .filter(|ratio| (1.0 / MAX_RATIO..=MAX_RATIO).contains(ratio))
            .map(Aspect)
            .ok_or_else(|| format!("expected a ratio from 1:{MAX_RATIO} to {MAX_RATIO}:1, such as 16:9"))
    }

    /// Returns width and height with this ratio: next to the given side, or with about `side²` pixels; in multiples
    /// of `unit`.
    pub fn size(self, width: Option<u32>, height: Option<u32>, side: usize, unit: usize) -> (u32, u32) {
        let unit = unit as f64;
        let round = |side: f64| ((side / unit).round().max(1.0) * unit) as u32;
        let root = self.0.sqrt();
        match (width, height) {
            (Some(width), _) => (width, round(f64::from(width) / self.0)),
            (None, Some(height)) => (round(f64::from(height) * self.0), height),
            (None, None) => (round(side as f64 * root), round(side as f64 / root)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aspect_ratio_keeps_the_number_of_pixels_in_multiples_of_16() {
        let size = |text, side| Aspect::parse(text).unwrap().size(None, None, side, 16);
        assert_eq!(size("1:1", 1024), (1024, 1024));
        assert_eq!(size("16:9", 1024), (1360, 768));
        assert_eq!(size("9:16", 1024), (768, 1360));
        assert_eq!(size("3:2", 256), (320, 208));
        assert_eq!(size("16:1", 16), (64, 16));
        let beside = |width, height| Aspect::parse("16:9").unwrap().size(width, height, 1024, 16);
        assert_eq!(beside(Some(1280), None), (1280, 720));
        assert_eq!(beside(None, Some(512)), (912, 512));
    }

    #[test]
    fn sizes_and_ratios_are_parsed_strictly() {
        assert_eq!(parse_size("768x512"), Ok((768, 512)));
        for wrong in ["768", "768x", "x512", "768x8", "-768x512", "768x512x3", "1e3x16"] {
            assert!(parse_size(wrong).unwrap_err().contains("such as 768x512"), "{wrong}");
        }
        for wrong in ["16", "16:", "0:9", "16:-9", "nan:1", "100:1", "1:100", "inf:inf"] {
            assert!(Aspect::parse(wrong).unwrap_err().contains("such as 16:9"), "{wrong}");
        }
    }
}
