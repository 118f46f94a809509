//! Upscaling: tiles, their events and previews, cancelling, and the same bytes again.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use kiln_engine::{BatchLimit, Event, Explain, LocalFiles, Plan, Recipe, Request};
use kiln_image::{Format, RgbImage};
use tempfile::TempDir;

use crate::recording_sink::{RecordingSink, SinkCall, Tiny, tiny};

/// A file with an image of 44x40, whose double is 88x80: four tiles of up to 64.
struct Source {
    _folder: TempDir,
    path: PathBuf,
}

impl Source {
    fn new() -> Source {
        let pixel = |i: u32| [(i % 44 * 5) as u8, (i / 44 * 6) as u8, (i % 7 * 30) as u8];
        let image = RgbImage::new(44, 40, (0..44 * 40).flat_map(pixel).collect()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("source.png");
        std::fs::write(&path, kiln_image::encode(&image, Format::Png, None).unwrap()).unwrap();
        Source { _folder: folder, path }
    }

    fn request(&self) -> Request {
        Request {
            init: Some(self.path.clone().into()),
            upscale: Some(2),
            tile_size: Some(64),
            max_tokens: Some(32),
            seed: vec![3],
            ..Request::default()
        }
    }
}

fn is_tile(call: &SinkCall) -> bool {
    matches!(call, SinkCall::Event(Event::TileStarted { .. }))
}

fn run(klein: &Tiny, plan: &Arc<Plan>, sink: &Arc<RecordingSink>) {
    let engine = klein.load();
    engine.generate(&[sink.task(plan)], &BatchLimit::ONE);
    engine.finish();
}

#[test]
fn an_image_is_upscaled_tile_by_tile_with_events_and_previews() {
    let (klein, source) = (tiny("klein"), Source::new());
    let plan = klein.plan(&source.request());
    let tiles = plan.upscale().unwrap().tiles.count();
    assert_eq!((tiles, plan.output_size()), (4, [88, 80]));
    assert!(plan.width <= 64 && plan.height <= 64);
    let sink = Arc::new(RecordingSink { wants_preview: Box::new(|()| true), ..RecordingSink::default() });
    run(&klein, &plan, &sink);
    assert_eq!(sink.count(is_tile), 4);
    let whole = |call: &SinkCall| matches!(call, SinkCall::Preview(image) if image.width() == 96);
    assert_eq!(sink.count(whole), 4);
    let image = sink.images().remove(0);
    assert_eq!((image.image.width(), image.image.height()), (88, 80));
    // Tokens of the padded image, 96x80.
    assert_eq!(image.latents.shape().dims()[0], 6 * 5);

    // Again, and from its recipe.
    let recipe = Recipe::parse(&image.recipe.to_json()).unwrap();
    let again = klein.plan(&recipe.request(&Request::default()).unwrap());
    let second = Arc::<RecordingSink>::default();
    run(&klein, &again, &second);
    let second = second.images().remove(0);
    assert!(second.image == image.image && second.latents == image.latents);
    assert_eq!(second.recipe, image.recipe);
}

#[test]
fn a_cancelled_run_stops_before_the_next_tile() {
    let (klein, source) = (tiny("klein"), Source::new());
    let plan = klein.plan(&source.request());
    let sink = Arc::new_cyclic(|sink: &std::sync::Weak<RecordingSink>| {
        let sink = sink.clone();
        RecordingSink {
            on_event: Box::new(move |event| {
                if matches!(event, Event::TileStarted { tile: 1, .. }) {
                    sink.upgrade().unwrap().cancel.store(true, SeqCst);
                }
            }),
            ..RecordingSink::default()
        }
    });
    run(&klein, &plan, &sink);
    assert_eq!(sink.count(is_tile), 2);
    let (error, images) = sink.error();
    assert!(error.is_cancelled() && images == 0, "{error}");
}

#[test]
fn several_images_have_noise_of_their_own() {
    let (klein, source) = (tiny("klein"), Source::new());
    let both = klein.plan(&Request { n: Some(2), ..source.request() });
    let second = klein.plan(&Request { seed: vec![4], ..source.request() });
    let (sinks, alone) = (Arc::<RecordingSink>::default(), Arc::<RecordingSink>::default());
    run(&klein, &both, &sinks);
    run(&klein, &second, &alone);
    let (images, alone) = (sinks.images(), alone.images());
    assert_ne!(images[0].image, images[1].image);
    assert_eq!(images[1].image, alone[0].image);
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let (klein, source) = (tiny("klein"), Source::new());
    let error = |request: Request| {
        Plan::new(&klein.model, &request, &LocalFiles).map(|_| ()).unwrap_err().to_string()
    };
    let own = || source.request();
    assert!(error(Request { upscale: Some(3), ..own() }).contains("2 or 4"));
    assert!(error(Request { init: None, ..own() }).contains("`upscale` needs `init`"));
    assert!(error(Request { width: Some(64), ..own() }).contains("`width` and `upscale`"));
    assert!(error(Request { sigmas: vec![1.0], ..own() }).contains("`sigmas` and `upscale`"));
    assert!(error(Request { strength: Some(0.0), ..own() }).contains("above 0"));
    assert!(error(Request { tile_size: Some(4096), ..own() }).contains("between 64 and 2048"));
    assert!(error(Request { upscale: None, ..own() }).contains("`tile_size` needs `upscale`"));
}

#[test]
fn a_file_format_that_can_not_hold_the_size_is_refused() {
    let klein = tiny("klein");
    let plan = |format, quality, width| {
        let request = Request {
            prompts: vec!["a fox".into()],
            width: Some(width),
            height: Some(16),
            output_format: Some(format),
            output_compression: quality,
            ..Request::default()
        };
        Plan::new(&klein.model, &request, &LocalFiles).map(|_| ()).map_err(|error| error.to_string())
    };
    use kiln_engine::OutputFormat::{Jpeg, Png, Webp};
    assert!(plan(Webp, None, 16400).unwrap_err().contains("a WebP file has at most 16384 pixels"));
    assert!(plan(Webp, Some(80), 16384).unwrap_err().contains("at most 16383"));
    assert!(plan(Jpeg, None, 65536).unwrap_err().contains("a JPEG file has at most 65535 pixels"));
    assert_eq!(
        (plan(Webp, None, 16384), plan(Jpeg, None, 65520), plan(Png, None, 65536)),
        (Ok(()), Ok(()), Ok(()))
    );
}
