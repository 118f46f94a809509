//! Upscaling: an image enlarged by 2 or 4, which the model refines tile by tile.
//!
//! ```text
//! initial image ─bicubic─▶ enlarged image ─tile─▶ noised to the level `strength` ─steps─▶ refined tile ─┐
//!                            ▲ reference: the tile, the whole image                                    │ blended
//!                            └──────────────── the next tile sees its finished neighbours ◀────────────┘
//! ```
//! Memory is bounded: a tile in the model, and two copies of the result as bytes.

use std::ops::RangeInclusive;

use kiln_image::{MAX_SIDE, TileGrid};
use kiln_nn::schedule::Schedule;

use super::contents::{StartingPoint, UpscaleInputs};
use super::defaults::{round_side, spacing};
use crate::error::{Error, Field, Result};
use crate::inputs::{InputResolver, read_image};
use crate::model::Model;
use crate::once::TryOnceLock;
use crate::request::Request;
use crate::{hint, text};

/// Default noise level that tiles start from: new detail, but nothing moves.
const STRENGTH: f64 = 0.35;
/// Longest sides that tiles may have.
pub(super) const TILE_SIDES: RangeInclusive<u32> = 64..=2048;
/// Neighbours overlap by this many pixels, or by an eighth of a larger tile, or half of a smaller one.
const OVERLAP: u32 = 64;
/// The prompt if there is none.
const PROMPT: &str = "the same image in high resolution, sharp and rich in fine detail";

/// Refuses fields that have no meaning for upscaling, and values out of range.
pub(super) fn check(request: &Request) -> Result<()> {
    let Some(scale) = request.upscale else {
        return match request.tile_size {
            Some(_) => Err(Error::value(text![Field::TileSize, " needs ", Field::Upscale])
                .with_hint(hint!["choose a factor of 2 or 4 with ", Field::Upscale])),
            None => Ok(()),
        };
    };
    if scale != 2 && scale != 4 {
        return Err(Error::value(text![Field::Upscale, format!(" must be 2 or 4, found {scale}")]));
    }
    if request.init.is_none() {
        return Err(Error::value(text![Field::Upscale, " needs ", Field::Init])
            .with_hint(hint!["give the image to enlarge as ", Field::Init]));
    }
    if let Some(strength) = request.strength.filter(|strength| !(*strength > 0.0 && *strength <= 1.0)) {
        let range = format!(" must be above 0 and at most 1, found {strength}");
        let what = text!["to upscale, ", Field::Strength, range];
        return Err(Error::value(what).with_hint("0.2 stays close to the image, 0.5 invents detail"));
    }
    let excluded = [
        (Field::Mask, request.mask.is_some()),
        (Field::Width, request.width.is_some()),
        (Field::Height, request.height.is_some()),
        (Field::Sigmas, !request.sigmas.is_empty()),
    ];
    match excluded.iter().find(|(_, given)| *given) {
        Some((field, _)) => Err(Error::value(text![*field, " and ", Field::Upscale, " can't be combined"])
            .with_hint(hint![
                "leave out ",
                *field,
                format!(": the result is the image, {scale} times as large")
            ])),
        None => Ok(()),
    }
}

/// Returns the prompts of a request; for upscaling there is a default.
pub(super) fn prompts(request: &Request) -> Vec<String> {
    match request.upscale {
        Some(_) if request.prompts.is_empty() => vec![PROMPT.into()],
        _ => request.prompts.clone(),
    }
}

/// Reads the image and divides it into tiles. Returns the width and height of a tile, the starting point and the strength.
pub(super) fn read(
    model: &Model,
    request: &Request,
    resolved: &mut Request,
    inputs: &dyn InputResolver,
    notes: &mut Vec<String>,
) -> Result<Option<(usize, usize, StartingPoint, f64)>> {
    let (Some(scale), Some(init)) = (request.upscale, &mut resolved.init) else { return Ok(None) };
    let side = round_side(model, "tile size", request.tile_size.unwrap_or(model.default_size as u32), notes)?;
    let source = read_image(inputs, init, "image to upscale")?;
    let (width, height) = (source.width(), source.height());
    if width.max(height) > MAX_SIDE / scale {
        return Err(Error::request(format!(
            "an image of {width}x{height} can't be upscaled by {scale}: the result may have at most {MAX_SIDE} pixels a side"
        ))
        .with_hint("use a smaller factor or image"));
    }
    let unit = model.pixels_per_token() as u32;
    let overlap = (side / 8).max(OVERLAP.min(side / 2));
    let tiles =
        TileGrid::new([width, height].map(|side| (side * scale).next_multiple_of(unit)), side, overlap, unit);
    let area = u64::from(tiles.tile_width()) * u64::from(tiles.tile_height());
    let overview = (tiles.count() > 1).then(|| kiln_image::overview(&source, area / 4, unit));
    let (tile_width, tile_height) = (tiles.tile_width() as usize, tiles.tile_height() as usize);
    resolved.tile_size = Some(side);
    let inputs = UpscaleInputs { source, scale, unit, tiles, overview, enlarged: TryOnceLock::new() };
    let start = StartingPoint::Upscale(Box::new(inputs));
    Ok(Some((tile_width, tile_height, start, request.strength.unwrap_or(STRENGTH))))
}

/// Computes the noise levels of a tile of `tokens` tokens: from `strength` down. By default it takes as many of the
/// model's steps, at least two.
pub(super) fn schedule(model: &Model, request: &Request, tokens: usize, strength: f64) -> Schedule {
    let whole = model.default_steps();
    let share = (whole as f64 * strength).ceil() as usize;
    let steps = request.steps.map_or(share.max(2), |steps| steps as usize);
    Schedule::from_level(&model.scheduler, spacing(request), tokens, whole, steps, strength)
}
