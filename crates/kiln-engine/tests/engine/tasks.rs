//! An engine and its sinks: what is told, when, and that every task ends once whatever its sink does.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use kiln_cpu::{CpuBackend, Options as CpuOptions};
use kiln_engine::pipeline::{LoadOptions, Pipeline};
use kiln_engine::{BatchLimit, Engine, Error, Event, Image, Request, Sink, Task};

use crate::listener::{Gate, Heard, LONG, Listener, is_end, is_image, request, tiny};

const ALL: BatchLimit = BatchLimit { images: 16, rows: None, memory: None };

fn listener() -> Arc<Listener> {
    Arc::default()
}

#[track_caller]
fn same(found: &[Image], expected: &[Image]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.latents == expected.latents && found.picture == expected.picture);
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
        let sinks = [listener(), listener()];
        engine.generate(&[sinks[0].task(&plans[0]), sinks[1].task(&plans[1])], &limit);
        engine.finish();
        for (plan, sink) in plans.iter().zip(&sinks) {
            let expected = pipeline.generate(plan, &mut ()).unwrap();
            let found = sink.images();
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.latents == expected.latents && found.picture == expected.picture);
                assert_eq!(found.index, expected.index);
                let image = plan.image(found.index);
                assert_eq!(
                    (found.seed, found.recipe.request.prompts.first()),
                    (image.seed, image.prompt.as_ref())
                );
                assert_eq!((found.recipe.index, found.recipe.batch), image.part);
            }
        }
    }
}

#[test]
fn images_of_one_task_arrive_while_the_next_is_generated() {
    let klein = tiny("klein");
    let engine = klein.load();
    let first = listener();
    let before = Arc::clone(&first);
    let second = Arc::new(Listener {
        on_event: Box::new(move |event| {
            if matches!(event, Event::StepFinished { step: 0, .. }) {
                assert!(before.wait_for(1, is_end), "the first has not ended while the second was generated");
            }
        }),
        ..Listener::default()
    });
    let tasks =
        [first.task(&klein.plan(&request("a cat", 1))), second.task(&klein.plan(&request("a dog", 2)))];
    engine.generate(&tasks, &BatchLimit::ONE);
    engine.finish();
    assert_eq!((first.images().len(), second.images().len()), (1, 1));
}

#[test]
fn a_sink_that_takes_its_time_does_not_stop_the_next_task() {
    let klein = tiny("klein");
    let engine = klein.load();
    let gate = Arc::new(Gate::default());
    let door = Arc::clone(&gate);
    let first = Arc::new(Listener {
        on_image: Box::new(move |_| {
            door.wait();
            Ok(())
        }),
        ..Listener::default()
    });
    let second = listener();
    engine.generate(&[first.task(&klein.plan(&request("a cat", 1)))], &BatchLimit::ONE);
    engine.generate(&[second.task(&klein.plan(&request("a dog", 2)))], &BatchLimit::ONE);
    // All of the second's work was given to the device, and the first's image is still being saved.
    assert_eq!(second.count(|heard| matches!(heard, Heard::Event(Event::Decoding { .. }))), 1);
    assert_eq!((first.count(is_image), first.count(is_end), second.count(is_end)), (0, 0, 0));
    gate.open();
    engine.finish();
    assert_eq!((first.images().len(), second.images().len()), (1, 1));
}

#[test]
fn images_that_nobody_takes_do_not_pile_up() {
    let klein = tiny("klein");
    let engine = klein.load();
    let gate = Arc::new(Gate::default());
    let door = Arc::clone(&gate);
    let sink = Arc::new(Listener {
        on_image: Box::new(move |_| {
            door.wait();
            Ok(())
        }),
        ..Listener::default()
    });
    let task = sink.task(&klein.plan(&Request { n: Some(12), ..request("a cat", 1) }));
    std::thread::scope(|scope| {
        scope.spawn(|| engine.generate(&[task], &BatchLimit::ONE));
        let decoding = |heard: &Heard| matches!(heard, Heard::Event(Event::Decoding { .. }));
        // One is being taken, four wait, and one waits with whoever made it.
        assert!(sink.wait_for(6, decoding));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(sink.count(decoding), 6);
        gate.open();
    });
    engine.finish();
    assert_eq!(sink.images().len(), 12);
}

/// A sink that cancels its task when it hears of such an event.
fn cancels(when: impl Fn(&Event) -> bool + Send + Sync + 'static) -> Arc<Listener> {
    Arc::new_cyclic(|own: &std::sync::Weak<Listener>| {
        let own = own.clone();
        let on_event = move |event: &Event| {
            if when(event) {
                own.upgrade().unwrap().stop.store(true, SeqCst);
            }
        };
        Listener { on_event: Box::new(on_event), ..Listener::default() }
    })
}

type When = fn(&Event) -> bool;

#[test]
fn a_task_that_is_cancelled_leaves_the_others_as_they_are() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    let alone = listener();
    engine.generate(&[alone.task(&plan)], &ALL);
    engine.finish();
    let expected = alone.images();
    let other = || klein.plan(&Request { n: Some(2), ..request("a dog", 2) });
    let block = |event: &Event| matches!(event, Event::Block { .. });
    let step = |event: &Event| matches!(event, Event::StepFinished { step: 1, .. });
    let next = |event: &Event| matches!(event, Event::StepStarted { picture: 1, step: 0, .. });
    let decoding = |event: &Event| matches!(event, Event::Decoding { .. });
    // Within a step, between two, between two images, after the steps: with how many images, one by one and together.
    let cases: [(When, BatchLimit, usize); 7] = [
        (block, BatchLimit::ONE, 0),
        (block, ALL, 0),
        (step, BatchLimit::ONE, 0),
        (step, ALL, 0),
        (next, BatchLimit::ONE, 1),
        (decoding, BatchLimit::ONE, 0),
        (decoding, ALL, 0),
    ];
    for (i, (when, limit, images)) in cases.into_iter().enumerate() {
        let (stopped, going) = (cancels(when), listener());
        engine.generate(&[stopped.task(&other()), going.task(&plan)], &limit);
        engine.finish();
        let (error, found) = stopped.error();
        assert!(error.is_cancelled(), "case {i}: {error:?}");
        assert_eq!(found, images, "case {i}");
        same(&going.images(), &expected);
    }
    // Before it began.
    let stopped = listener();
    stopped.stop.store(true, SeqCst);
    engine.generate(&[stopped.task(&plan)], &ALL);
    engine.finish();
    assert_eq!(stopped.count(|heard| matches!(heard, Heard::Event(Event::StepStarted { .. }))), 0);
    assert!(stopped.error().0.is_cancelled());
}

#[test]
fn an_image_that_is_not_taken_ends_its_task_with_that_error() {
    let klein = tiny("klein");
    let engine = klein.load();
    for limit in [BatchLimit::ONE, ALL] {
        for refused in [0, 1, 2] {
            let asked = Arc::new(Mutex::new(Vec::new()));
            let heard = Arc::clone(&asked);
            let full = Arc::new(Listener {
                on_image: Box::new(move |image| {
                    heard.lock().unwrap().push(image.index);
                    if image.index == refused { Err(Error::request("the disk is full")) } else { Ok(()) }
                }),
                ..Listener::default()
            });
            let other = listener();
            let three = klein.plan(&Request { n: Some(3), ..request("a cat", 1) });
            engine.generate(&[full.task(&three), other.task(&klein.plan(&request("a dog", 2)))], &limit);
            engine.finish();
            let (error, images) = full.error();
            assert!(matches!(&error, Error::Request { what, .. } if what == "the disk is full"), "{error:?}");
            assert_eq!(images, refused);
            // Nothing follows the one that was refused.
            assert_eq!(*asked.lock().unwrap(), (0..=refused).collect::<Vec<_>>());
            assert_eq!(other.images().len(), 1);
        }
    }
}

/// Panics in one of a sink's functions, the first time that it is called.
fn panics_in(function: &str) -> Arc<Listener> {
    let mut sink = Listener { wants_preview: Box::new(|()| true), ..Listener::default() };
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
fn a_sink_that_panics_ends_its_own_task_only() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    let alone = listener();
    engine.generate(&[alone.task(&plan)], &ALL);
    engine.finish();
    let expected = alone.images();
    for function in ["cancelled", "event", "wants_preview", "preview", "image"] {
        for limit in [BatchLimit::ONE, ALL] {
            let (wild, other) = (panics_in(function), listener());
            engine.generate(&[wild.task(&plan), other.task(&plan)], &limit);
            engine.finish();
            let (error, images) = wild.error();
            let told = matches!(&error, Error::Panicked(words) if words == "on purpose");
            assert!(told && images < 2, "{function}: {error:?} after {images} images");
            same(&other.images(), &expected);
        }
    }
}

#[test]
fn a_sink_that_panics_at_its_end_hears_of_it_once() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&request("a cat", 1));
    for fails in [false, true] {
        let ends = Arc::new(Mutex::new(0));
        let count = Arc::clone(&ends);
        let mut wild = Listener {
            on_ended: Box::new(move |_| {
                *count.lock().unwrap() += 1;
                panic!("on purpose");
            }),
            ..Listener::default()
        };
        if fails {
            wild.on_image = Box::new(|_| panic!("on purpose"));
        }
        let (wild, other) = (Arc::new(wild), listener());
        engine.generate(&[wild.task(&plan), other.task(&plan)], &ALL);
        engine.finish();
        assert_eq!(*ends.lock().unwrap(), 1);
        assert_eq!(other.images().len(), 1);
    }
}

#[test]
fn tasks_end_when_their_engine_is_dropped_at_once() {
    let klein = tiny("klein");
    let plan = klein.plan(&Request { n: Some(3), ..request("a cat", 1) });
    let engine = klein.load();
    let sinks = [listener(), listener(), panics_in("image")];
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
    let sink = Arc::new(Listener {
        on_ended: Box::new(move |_| {
            // Whoever generates has to be done with it first.
            drop(inside.lock().unwrap().take());
        }),
        ..Listener::default()
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
    wait.recv_timeout(LONG).unwrap();
    assert!(sink.wait_for(1, is_end));
    assert_eq!(sink.images().len(), 1);
    assert!(held.lock().unwrap().is_none());
}

#[test]
fn tasks_of_several_threads_end_once_each() {
    let klein = tiny("klein");
    let engine = klein.load();
    let alone = listener();
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
                    let odd = match (thread + round) % 3 {
                        0 => cancels(block),
                        1 => panics_in("image"),
                        _ => panics_in("event"),
                    };
                    let good = listener();
                    engine.generate(&[good.task(plan), odd.task(plan)], &ALL);
                    engine.finish();
                    same(&good.images(), expected);
                    odd.error();
                }
            });
        }
    });
    engine.generate(&[], &ALL);
}

#[test]
fn previews_are_made_for_who_looks() {
    let klein = tiny("klein");
    let engine = klein.load();
    let plan = klein.plan(&request("a cat", 1));
    let looking = || Arc::new(Listener { wants_preview: Box::new(|()| true), ..Listener::default() });
    let preview = |heard: &Heard| matches!(heard, Heard::Preview(_));
    for limit in [BatchLimit::ONE, ALL] {
        let (blind, seeing) = (listener(), looking());
        engine.generate(&[blind.task(&plan), seeing.task(&plan)], &limit);
        engine.finish();
        // After every step but the last, which the image itself follows.
        assert_eq!((blind.count(preview), seeing.count(preview)), (0, 2));
        let square =
            |heard: &Heard| matches!(heard, Heard::Preview(p) if p.width() > 0 && p.width() == p.height());
        assert_eq!(seeing.count(square), 2);
        same(&blind.images(), &seeing.images());
    }
}

/// The trait's own defaults: nobody cancels and nobody looks.
#[test]
fn a_sink_needs_no_more_than_events_images_and_an_end() {
    struct Least(Mutex<Vec<usize>>, Mutex<Option<bool>>);
    impl Sink for Least {
        fn event(&self, _: &Event) {}
        fn image(&self, image: Image) -> kiln_engine::Result<()> {
            self.0.lock().unwrap().push(image.index);
            Ok(())
        }
        fn ended(&self, result: kiln_engine::Result<()>) {
            assert!(self.1.lock().unwrap().replace(result.is_ok()).is_none());
        }
    }
    let klein = tiny("klein");
    let engine = klein.load();
    let sink = Arc::new(Least(Mutex::default(), Mutex::default()));
    let plan = klein.plan(&Request { n: Some(2), ..request("a cat", 1) });
    engine.generate(&[Task { plan, sink: sink.clone() }], &ALL);
    engine.finish();
    assert_eq!((&*sink.0.lock().unwrap(), *sink.1.lock().unwrap()), (&vec![0, 1], Some(true)));
}
