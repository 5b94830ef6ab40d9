"""Gloo below the links: raw process groups over one device, built over the bus and released on purpose.

It decides how two processes find each other (`bus_store`), prove that they belong to one job
(`link_authentication`), give up what can't be reached (`reachability`), and bring device memory to the host
(`pinned_buffers`). Only `workers.links` and the stage runtime call it. It knows no microbatches.
"""
