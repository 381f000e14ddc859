"""Deployment: users, shufflers and analyzer as separate parties, with the protocol objects of the simulation.

What all agree on is a `task`, signed with `keys`; they talk in the messages of `wire`, sealed by `sealing`, over
`links`. A user is a `client` with a `policy` and a `ledger` of its own, perhaps behind an `agent`. A `shuffler` keeps
uploads in a `store`. The `analyzer` keeps sums and models in a `book`, what they cost in a `ledger`, and computes with
`learning`. `services` puts shuffler and analyzer behind HTTPS, `flower` carries reports over a Flower fleet, `fleet`
starts everybody on one machine, with the data and model of a config (`federation`).
"""
