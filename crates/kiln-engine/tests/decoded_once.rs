//! A reference image is decoded and resized once, however many images are generated from it. A single test in its own
//! process, because the counters are global.

use std::path::Path;
use std::sync::Arc;

use kiln_engine::{
    BatchLimit, Device, ImageCollector, LocalFiles, Model, Plan, Precision, Request, Settings, Setup, Task,
};
use kiln_golden::{Checkpoint, testdata};
use kiln_image::{Format, RgbImage, counters};

fn write_image(file: &Path, width: u32, height: u32) {
    let pixels = (0..width * height * 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let image = RgbImage::new(width, height, pixels).unwrap();
    std::fs::write(file, kiln_image::encode(&image, Format::Png, None).unwrap()).unwrap();
}

/// Runs a function, and counts the images that it decodes and resizes.
fn counted<T>(work: impl FnOnce() -> T) -> (T, [u64; 2]) {
    let before = counters();
    let result = work();
    let after = counters();
    (result, [after.decoded - before.decoded, after.resampled - before.resampled])
}

#[test]
fn images_are_decoded_and_resized_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // The model's default size is small, so that small references still have to be resized.
    let klein = Checkpoint::assemble(&testdata(), "klein").unwrap();
    klein.write_single_file(&path("klein.safetensors"), &[("default_size", "96")]).unwrap();
    write_image(&path("one.png"), 160, 120);
    write_image(&path("two.png"), 130, 180);
    write_image(&path("init.png"), 150, 100);

    let model = Arc::new(Model::open(path("klein.safetensors")).unwrap());
    let request = Request {
        n: Some(3),
        width: Some(64),
        height: Some(64),
        steps: Some(2),
        max_tokens: Some(32),
        references: vec![path("one.png").into(), path("two.png").into()],
        ..Request::new("a fox")
    };
    let plan = |request: &Request| Arc::new(Plan::new(&model, request, &LocalFiles).unwrap());
    let (edit, work) = counted(|| plan(&request));
    assert_eq!(work, [2, 2]);
    let settings =
        Settings { device: Device::Cpu, precision: Precision::F32, threads: Some(2), ..Settings::default() };
    let sink = Arc::new(ImageCollector::default());
    let run = |plan: &Arc<Plan>, limit: &BatchLimit| {
        let engine = Setup::new(&model, &settings, Some(plan)).unwrap().load(&*sink).unwrap();
        engine.generate(&[Task { plan: Arc::clone(plan), sink: sink.clone() }], limit);
        engine.finish();
        sink.take().unwrap()
    };
    let all = BatchLimit { images: 16, rows: None, memory: None };
    let (first, work) = counted(|| run(&edit, &all));
    assert_eq!((first.len(), work), (3, [0, 0]));
    let (second, work) = counted(|| run(&edit, &BatchLimit::ONE));
    assert_eq!((second.len(), work), (3, [0, 0]));
    assert!(first.iter().zip(&second).all(|(a, b)| a.image == b.image));

    // An initial image is resized on first use, and kept.
    let (vary, work) = counted(|| plan(&Request { init: Some(path("init.png").into()), ..request.clone() }));
    assert_eq!(work, [3, 2]);
    assert_eq!(counted(|| run(&vary, &all)).1, [0, 1]);
    assert_eq!(counted(|| run(&vary, &all)).1, [0, 0]);
}
