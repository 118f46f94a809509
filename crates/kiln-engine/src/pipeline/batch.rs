//! The requests that share a batch, and their observers.

use std::ops::Range;

use kiln_nn::{Event, Observer};
use kiln_ops::Backend;

use super::output::PendingOutput;
use crate::error::{Error, Result};
use crate::plan::Plan;

/// One request of a batch.
pub struct BatchMember<'a, B: Backend> {
    /// What to generate.
    pub plan: &'a Plan,
    /// Observes this request only; its error stops this request and no other.
    pub observer: &'a mut dyn Observer<B>,
    /// Receives every image as soon as its work is queued on the device.
    pub output: &'a mut dyn FnMut(PendingOutput<B>) -> Result<()>,
}

/// The members of a batch, which of them are active, and the images in progress.
///
/// A member whose request has ended gets no more events; the others continue. As an observer of the transformer, the
/// batch reports to all members with images in progress, and stops the call when none is left.
pub(super) struct Batch<'c, 'm, B: Backend> {
    members: &'c mut [BatchMember<'m, B>],
    /// Receives the result of each member's request.
    ended: &'c mut dyn FnMut(usize, Result<()>),
    active: Vec<bool>,
    /// Members with images in progress, and the range of these images.
    in_progress: Vec<(usize, Range<usize>)>,
}

impl<'c, 'm, B: Backend> Batch<'c, 'm, B> {
    pub(super) fn new(
        members: &'c mut [BatchMember<'m, B>],
        ended: &'c mut dyn FnMut(usize, Result<()>),
    ) -> Self {
        let active = vec![true; members.len()];
        Batch { members, ended, active, in_progress: Vec::new() }
    }

    /// Whether this member's request has not ended.
    pub(super) fn is_active(&self, member: usize) -> bool {
        self.active[member]
    }

    /// Ends a member's request.
    pub(super) fn end(&mut self, member: usize, result: Result<()>) {
        if std::mem::take(&mut self.active[member]) {
            (self.ended)(member, result);
        }
    }

    /// Sets the images in progress, given as member and index; those of one member are consecutive.
    pub(super) fn set_in_progress(&mut self, images: impl Iterator<Item = (usize, usize)>) {
        self.in_progress.clear();
        for (member, image) in images {
            match self.in_progress.last_mut() {
                Some((last, own)) if *last == member => own.end = image + 1,
                _ => self.in_progress.push((member, image..image + 1)),
            }
        }
    }

    /// Returns the number of images in progress of active members.
    fn image_count(&self) -> usize {
        self.in_progress.iter().filter(|(member, _)| self.is_active(*member)).map(|(_, own)| own.len()).sum()
    }

    /// Returns the member whose image is the only one in progress. Only then are the transformer's intermediate tensors
    /// shown: with several images they hold the rows of all.
    fn single_member(&self) -> Option<usize> {
        match &self.in_progress[..] {
            [(member, own)] if own.len() == 1 => Some(*member),
            _ => None,
        }
    }

    /// Calls a function on a member, if it is active. An error ends the member's request.
    pub(super) fn with_member(
        &mut self,
        member: usize,
        call: impl FnOnce(&mut BatchMember<'m, B>) -> Result<()>,
    ) {
        if self.is_active(member)
            && let Err(error) = call(&mut self.members[member])
        {
            self.end(member, Err(error));
        }
    }

    /// Sends an event to every member with images in progress. `event` gets the member, its own images and the number
    /// of all images.
    pub(super) fn report(&mut self, event: impl Fn(usize, &Range<usize>, usize) -> Event) {
        let all = self.image_count();
        for (member, own) in std::mem::take(&mut self.in_progress) {
            self.with_member(member, |m| Ok(m.observer.event(event(member, &own, all))?));
            self.in_progress.push((member, own));
        }
    }

    /// Stops the run if no member is left.
    fn check_cancelled(&self) -> kiln_nn::Result<()> {
        if self.image_count() == 0 { Err(kiln_nn::Error::Cancelled) } else { Ok(()) }
    }
}

impl<B: Backend> Observer<B> for Batch<'_, '_, B> {
    fn event(&mut self, event: Event) -> kiln_nn::Result<()> {
        self.report(|_, _, _| event.clone());
        self.check_cancelled()
    }

    fn inspect(&mut self, name: &str, x: &B::Tensor) -> kiln_nn::Result<()> {
        if let Some(member) = self.single_member() {
            self.with_member(member, |m| Ok::<_, Error>(m.observer.inspect(name, x)?));
        }
        self.check_cancelled()
    }

    fn wants_tensors(&self) -> bool {
        self.single_member().is_some_and(|member| self.members[member].observer.wants_tensors())
    }
}
