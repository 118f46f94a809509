//! An engine and its sinks: the order of calls, and that every task ends once whatever its sink does.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{
    BatchLimit, Engine, Error, ErrorKind, Event, Explain, GeneratedImage, Request, Sink, Task,
};

use crate::recording_sink::{Gate, RecordingSink, SinkCall, TIMEOUT, is_end, is_image, request, tiny};

const ALL: BatchLimit = BatchLimit { images: 16, rows: None, memory: None };

fn sink() -> Arc<RecordingSink> {
    Arc::default()
}

#[track_caller]
fn assert_same(found: &[GeneratedImage], expected: &[GeneratedImage]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.latents == expected.latents && found.image == expected.image);
        assert_eq!((found.index, &found.recipe), (expected.index, &expected.recipe));
    }
}

#[test]
fn images_are_those_of_the_pipeline_to_the_last_bit() {
    let klein = tiny("klein");
    let plans =
        [klein.plan(&Request { n: Some(3), ..request("a cat", 7) }), klein.plan(&request("a dog", 8))];
    let backend = CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let pipeline = Pipeline::load(backend, &klein.model, &LoadOptions::default(), &mut ()).unwrap();
    let engine = klein.load();
    for limit in [BatchLimit::ONE, ALL] {
        let sinks = [sink(), sink()];
        engine.generate(&[sinks[0].task(&plans[0]), sinks[1].task(&plans[1])], &limit);
        engine.finish();
        for (plan, sink) in plans.iter().zip(&sinks) {
            let expected = pipeline.generate(plan, &mut ()).unwrap();
            let found = sink.images();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.latents == expected.latents && found.image == expected.image);
                assert_eq!(found.index, expected.index);
                let image = plan.image(found.index);
                assert_eq!(
                    (found.seed, found.recipe.request.prompts.first()),
                    (image.seed, image.prompt.as_ref())
                );
                assert_eq!((found.recipe.index, found.recipe.batch), (image.batch_index, image.batch));
            }
        }
    }
}

#[test]
fn images_of_one_task_arrive_while_the_next_is_generated() {
    let klein = tiny("klein");
    let engine = klein.load();
    let first = sink();
    let before = Arc::clone(&first);
    let second = Arc::new(RecordingSink {
        on_event: Box::new(move |event| {
            if matches!(event, Event::StepFinished { step: 0, .. }) {
                assert!(before.wait_for(1, is_end), "the first has not ended while the second was generated");
            }
        }),
        ..RecordingSink::default()
    });
    let tasks =
        [first.task(&klein.plan(&request("a cat", 1))), second.task(&klein.plan(&request("a dog", 2)))];
    engine.generate(&tasks, &BatchLimit::ONE);
    engine.finish();
    assert_eq!((first.images().len(), second.images().len()), (1, 1));
}

#[test]
fn a_slow_sink_does_not_block_the_next_task() {
    let klein = tiny("klein");
    let engine = klein.load();
    let gate = Arc::new(Gate::default());
    let door = Arc::clone(&gate);
    let first = Arc::new(RecordingSink {
        on_image: Box::new(move |_| {
            door.wait();
            Ok(())
        }),
        ..RecordingSink::default()
    });
    let second = sink();
    engine.generate(&[first.task(&klein.plan(&request("a cat", 1)))], &BatchLimit::ONE);
    engine.generate(&[second.task(&klein.plan(&request("a dog", 2)))], &BatchLimit::ONE);
    // All work of the second task is queued while the first one's image is still being saved.
    assert_eq!(second.count(|call| matches!(call, SinkCall::Event(Event::DecodingImage { .. }))), 1);
    assert_eq!((first.count(is_image), first.count(is_end), second.count(is_end)), (0, 0, 0));
    gate.open();
    engine.finish();
    assert_eq!((first.images().len(), second.images().len()), (1, 1));
}

#[test]
fn images_of_a_blocked_sink_do_not_pile_up() {
    let klein = tiny("klein");
    let engine = klein.load();
    let gate = Arc::new(Gate::default());
    let door = Arc::clone(&gate);
    let sink = Arc::new(RecordingSink {
        on_image: Box::new(move |_| {
            door.wait();
            Ok(())
        }),
        ..RecordingSink::default()
    });
    let task = sink.task(&klein.plan(&Request { n: Some(12), ..request("a cat", 1) }));
    std::thread::scope(|scope| {
        scope.spawn(|| engine.generate(&[task], &BatchLimit::ONE));
        let decoding = |call: &SinkCall| matches!(call, SinkCall::Event(Event::DecodingImage { .. }));
        // The sink has one, four are queued, and the generating thread holds one.
        assert!(sink.wait_for(6, decoding));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(sink.count(decoding), 6);
        gate.open();
    });
    engine.finish();
    assert_eq!(sink.images().len(), 12);
}

/// Returns a sink that cancels its task at a matching event.
fn cancels_at(matches: impl Fn(&Event) -> bool + Send + Sync + 'static) -> Arc<RecordingSink> {
    Arc::new_cyclic(|own: &std::sync::Weak<RecordingSink>| {
        let own = own.clone();
        let on_event = move |event: &Event| {
            if matches(event) {
                own.upgrade().unwrap().cancel.store(true, SeqCst);
            }
        };
        RecordingSink { on_event: Box::new(on_event), ..RecordingSink::default() }
    })
}

type EventFilter = fn(&Event) -> bool;

#[test]
fn a_cancelled_task_does_not_affect_the_others() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    let alone = sink();
    engine.generate(&[alone.task(&plan)], &ALL);
    engine.finish();
    let expected = alone.images();
    let other = || klein.plan(&Request { n: Some(2), ..request("a dog", 2) });
    let block = |event: &Event| matches!(event, Event::Block { .. });
    let step = |event: &Event| matches!(event, Event::StepFinished { step: 1, .. });
    let next = |event: &Event| matches!(event, Event::StepStarted { image: 1, step: 0, .. });
    let decoding = |event: &Event| matches!(event, Event::DecodingImage { .. });
    // Within a step, between two steps, between two images, after the steps; and the number of images delivered before.
    let cases: [(EventFilter, BatchLimit, usize); 7] = [
        (block, BatchLimit::ONE, 0),
        (block, ALL, 0),
        (step, BatchLimit::ONE, 0),
        (step, ALL, 0),
        (next, BatchLimit::ONE, 1),
        (decoding, BatchLimit::ONE, 0),
        (decoding, ALL, 0),
    ];
    for (i, (filter, limit, images)) in cases.into_iter().enumerate() {
        let (cancelled, completed) = (cancels_at(filter), sink());
        engine.generate(&[cancelled.task(&other()), completed.task(&plan)], &limit);
        engine.finish();
        let (error, found) = cancelled.error();
        assert!(error.is_cancelled(), "case {i}: {error:?}");
        assert_eq!(found, images, "case {i}");
        assert_same(&completed.images(), &expected);
    }
    // Before the first step.
    let cancelled = sink();
    cancelled.cancel.store(true, SeqCst);
    engine.generate(&[cancelled.task(&plan)], &ALL);
    engine.finish();
    assert_eq!(cancelled.count(|call| matches!(call, SinkCall::Event(Event::StepStarted { .. }))), 0);
    assert!(cancelled.error().0.is_cancelled());
}

#[test]
fn an_error_of_the_sink_ends_its_task() {
    let klein = tiny("klein");
    let engine = klein.load();
    for limit in [BatchLimit::ONE, ALL] {
        for refused in [0, 1, 2] {
            let delivered = Arc::new(Mutex::new(Vec::new()));
            let indices = Arc::clone(&delivered);
            let failing = Arc::new(RecordingSink {
                on_image: Box::new(move |image| {
                    indices.lock().unwrap().push(image.index);
                    if image.index == refused { Err(Error::request("the disk is full")) } else { Ok(()) }
                }),
                ..RecordingSink::default()
            });
            let other = sink();
            let three = klein.plan(&Request { n: Some(3), ..request("a cat", 1) });
            engine.generate(&[failing.task(&three), other.task(&klein.plan(&request("a dog", 2)))], &limit);
            engine.finish();
            let (error, images) = failing.error();
            assert_eq!((error.kind(), error.to_string()), (ErrorKind::Request, "the disk is full".into()));
            assert_eq!(images, refused);
            // Nothing follows the refused image.
            assert_eq!(*delivered.lock().unwrap(), (0..=refused).collect::<Vec<_>>());
            assert_eq!(other.images().len(), 1);
        }
    }
}

/// Returns a sink that panics in one of its functions.
fn panics_in(function: &str) -> Arc<RecordingSink> {
    let mut sink = RecordingSink { wants_preview: Box::new(|()| true), ..RecordingSink::default() };
    match function {
        "cancelled" => sink.on_cancelled = Box::new(|()| panic!("on purpose")),
        "event" => sink.on_event = Box::new(|_| panic!("on purpose")),
        "wants_preview" => sink.wants_preview = Box::new(|()| panic!("on purpose")),
        "preview" => sink.on_preview = Box::new(|()| panic!("on purpose")),
        "image" => sink.on_image = Box::new(|_| panic!("on purpose")),
        _ => unreachable!(),
    }
    Arc::new(sink)
}

#[test]
fn a_panicking_sink_ends_only_its_own_task() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    let alone = sink();
    engine.generate(&[alone.task(&plan)], &ALL);
    engine.finish();
    let expected = alone.images();
    for function in ["cancelled", "event", "wants_preview", "preview", "image"] {
        for limit in [BatchLimit::ONE, ALL] {
            let (panicking, other) = (panics_in(function), sink());
            engine.generate(&[panicking.task(&plan), other.task(&plan)], &limit);
            engine.finish();
            let (error, images) = panicking.error();
            let reported = matches!(&error, Error::Panicked(message) if message == "on purpose");
            assert!(reported && images < 2, "{function}: {error:?} after {images} images");
            assert_same(&other.images(), &expected);
        }
    }
}

#[test]
fn a_sink_that_panics_at_its_end_is_ended_once() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&request("a cat", 1));
    for fails in [false, true] {
        let ends = Arc::new(Mutex::new(0));
        let count = Arc::clone(&ends);
        let mut panicking = RecordingSink {
            on_ended: Box::new(move |_| {
                *count.lock().unwrap() += 1;
                panic!("on purpose");
            }),
            ..RecordingSink::default()
        };
        if fails {
            panicking.on_image = Box::new(|_| panic!("on purpose"));
        }
        let (panicking, other) = (Arc::new(panicking), sink());
        engine.generate(&[panicking.task(&plan), other.task(&plan)], &ALL);
        engine.finish();
        assert_eq!(*ends.lock().unwrap(), 1);
        assert_eq!(other.images().len(), 1);
    }
}

#[test]
fn tasks_end_when_their_engine_is_dropped() {
    let klein = tiny("klein");
    let plan = klein.plan(&Request { n: Some(3), ..request("a cat", 1) });
    let engine = klein.load();
    let sinks = [sink(), sink(), panics_in("image")];
    engine.generate(&sinks.each_ref().map(|sink| sink.task(&plan)), &BatchLimit::ONE);
    drop(engine);
    assert_eq!((sinks[0].images().len(), sinks[1].images().len()), (3, 3));
    assert!(matches!(sinks[2].error(), (Error::Panicked(_), 0)));
}

#[test]
fn the_last_owner_of_an_engine_may_be_a_sink() {
    let klein = tiny("klein");
    let held: Arc<Mutex<Option<Box<dyn Engine>>>> = Arc::default();
    let inside = Arc::clone(&held);
    let sink = Arc::new(RecordingSink {
        on_ended: Box::new(move |_| {
            // Waits until `generate` has returned.
            drop(inside.lock().unwrap().take());
        }),
        ..RecordingSink::default()
    });
    *held.lock().unwrap() = Some(klein.load());
    let (done, wait) = mpsc::channel();
    let (task, engine) = (sink.task(&klein.plan(&request("a cat", 1))), Arc::clone(&held));
    std::thread::spawn(move || {
        let engine = engine.lock().unwrap();
        engine.as_ref().unwrap().generate(&[task], &ALL);
        drop(engine);
        done.send(()).unwrap();
    });
    wait.recv_timeout(TIMEOUT).unwrap();
    assert!(sink.wait_for(1, is_end));
    assert_eq!(sink.images().len(), 1);
    assert!(held.lock().unwrap().is_none());
}

#[test]
fn tasks_of_several_threads_end_once_each() {
    let klein = tiny("klein");
    let engine = klein.load();
    let alone = sink();
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    engine.generate(&[alone.task(&plan)], &ALL);
    engine.finish();
    let expected = alone.images();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (engine, plan, expected) = (&engine, &plan, &expected);
            scope.spawn(move || {
                let block = |event: &Event| matches!(event, Event::Block { .. });
                for round in 0..3 {
                    let failing = match (thread + round) % 3 {
                        0 => cancels_at(block),
                        1 => panics_in("image"),
                        _ => panics_in("event"),
                    };
                    let good = sink();
                    engine.generate(&[good.task(plan), failing.task(plan)], &ALL);
                    engine.finish();
                    assert_same(&good.images(), expected);
                    failing.error();
                }
            });
        }
    });
    engine.generate(&[], &ALL);
}

#[test]
fn previews_are_made_only_if_wanted() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&request("a cat", 1));
    let with_previews =
        || Arc::new(RecordingSink { wants_preview: Box::new(|()| true), ..RecordingSink::default() });
    let preview = |call: &SinkCall| matches!(call, SinkCall::Preview(_));
    for limit in [BatchLimit::ONE, ALL] {
        let (without, with) = (sink(), with_previews());
        engine.generate(&[without.task(&plan), with.task(&plan)], &limit);
        engine.finish();
        // After every step but the last.
        assert_eq!((without.count(preview), with.count(preview)), (0, 2));
        let square = |call: &SinkCall| matches!(call, SinkCall::Preview(p) if p.width() > 0 && p.width() == p.height());
        assert_eq!(with.count(square), 2);
        assert_same(&without.images(), &with.images());
    }
}

/// The defaults of the trait: never cancelled, no previews.
#[test]
fn a_sink_needs_only_events_images_and_an_end() {
    struct MinimalSink(Mutex<Vec<usize>>, Mutex<Option<bool>>);
    impl Sink for MinimalSink {
        fn event(&self, _: &Event) {}
        fn image(&self, image: GeneratedImage) -> kiln_engine::Result<()> {
            self.0.lock().unwrap().push(image.index);
            Ok(())
        }
        fn ended(&self, result: kiln_engine::Result<()>) {
            assert!(self.1.lock().unwrap().replace(result.is_ok()).is_none());
        }
    }
    let klein = tiny("klein");
    let engine = klein.load();
    let sink = Arc::new(MinimalSink(Mutex::default(), Mutex::default()));
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    engine.generate(&[Task { plan, sink: sink.clone() }], &ALL);
    engine.finish();
    assert_eq!((&*sink.0.lock().unwrap(), *sink.1.lock().unwrap()), (&vec![0, 1], Some(true)));
}
