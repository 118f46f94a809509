//! Those who watch pictures that are painted together.

use std::ops::Range;

use kiln_ops::Backend;

use super::Generated;
use crate::{Error, Event, Observer, Request, Result};

/// One request among those that are painted together.
pub struct Member<'a, B: Backend> {
    /// What is asked for.
    pub request: &'a Request,
    /// Hears of this request's pictures only; an error of its stops this request and no other.
    pub observer: &'a mut dyn Observer<B>,
    /// Takes every picture as soon as it is done.
    pub done: &'a mut dyn FnMut(Generated) -> Result<()>,
}

/// The members, how each stands, and which of them have pictures at work.
///
/// One who wants no more is noted and hears nothing further; the others don't notice. As an observer of the transformer it
/// tells all who are at work, and stops the call when none of them is left.
pub(super) struct Crowd<'c, 'm, B: Backend> {
    members: &'c mut [Member<'m, B>],
    /// Hears how each member's request ended.
    ended: &'c mut dyn FnMut(usize, Result<()>),
    there: Vec<bool>,
    /// Members with pictures at work, and which pictures.
    at_work: Vec<(usize, Range<usize>)>,
}

impl<'c, 'm, B: Backend> Crowd<'c, 'm, B> {
    pub(super) fn new(members: &'c mut [Member<'m, B>], ended: &'c mut dyn FnMut(usize, Result<()>)) -> Self {
        let there = vec![true; members.len()];
        Crowd { members, ended, there, at_work: Vec::new() }
    }

    /// Whether this member's request has not ended.
    pub(super) fn is_there(&self, member: usize) -> bool {
        self.there[member]
    }

    /// Ends a member's request.
    pub(super) fn end(&mut self, member: usize, result: Result<()>) {
        if std::mem::take(&mut self.there[member]) {
            (self.ended)(member, result);
        }
    }

    /// Takes up work on these pictures, given as member and number, those of one member one after the other.
    pub(super) fn begin(&mut self, pictures: impl Iterator<Item = (usize, usize)>) {
        self.at_work.clear();
        for (member, picture) in pictures {
            match self.at_work.last_mut() {
                Some((last, own)) if *last == member => own.end = picture + 1,
                _ => self.at_work.push((member, picture..picture + 1)),
            }
        }
    }

    /// How many pictures are at work whose members are still there.
    fn pictures(&self) -> usize {
        self.at_work.iter().filter(|(member, _)| self.is_there(*member)).map(|(_, own)| own.len()).sum()
    }

    /// The member whose one picture is all the work there is. Inside the transformer a tensor holds the rows of all: it is
    /// shown to one who is alone.
    fn alone(&self) -> Option<usize> {
        match &self.at_work[..] {
            [(member, own)] if own.len() == 1 => Some(*member),
            _ => None,
        }
    }

    /// Lets one member hear something, if it is there. Its error is its end.
    pub(super) fn tell(&mut self, member: usize, tell: impl FnOnce(&mut Member<'m, B>) -> Result<()>) {
        if self.is_there(member)
            && let Err(error) = tell(&mut self.members[member])
        {
            self.end(member, Err(error));
        }
    }

    /// Tells everybody at work, each of its own pictures: `event` gets their numbers and how many there are in all.
    pub(super) fn tell_each(&mut self, event: impl Fn(&Range<usize>, usize) -> Event) {
        let all = self.pictures();
        for (member, own) in std::mem::take(&mut self.at_work) {
            self.tell(member, |m| m.observer.event(event(&own, all)));
            self.at_work.push((member, own));
        }
    }
}

impl<B: Backend> Observer<B> for Crowd<'_, '_, B> {
    fn event(&mut self, event: Event) -> Result<()> {
        self.tell_each(|_, _| event.clone());
        if self.pictures() == 0 { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn see(&mut self, name: &str, x: &B::Tensor) -> Result<()> {
        if let Some(member) = self.alone() {
            self.tell(member, |m| m.observer.see(name, x));
        }
        if self.pictures() == 0 { Err(Error::Cancelled) } else { Ok(()) }
    }

    fn looks_inside(&self) -> bool {
        self.alone().is_some_and(|member| self.members[member].observer.looks_inside())
    }
}
